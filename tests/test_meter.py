"""The meter: bytes, FLOPs and ops against numbers computed by hand."""

import doctest
import gc
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from funcckpt import meter as module
from funcckpt.meter import Meter, mark, measure

KIB = 1024  # 256 floats


def test_docstrings():
    assert doctest.testmod(module).failed == 0


# Bytes


def test_peak_counts_everything_alive_at_once():
    def f(x):
        a = x.exp()  # 1
        b = a.sin()  # 2
        del a
        c = b.cos()  # 2
        return c + b  # 3

    m = measure(f, torch.zeros(256))
    assert (m.peak_bytes, m.end_bytes) == (3 * KIB, KIB)


def test_what_existed_before_is_not_counted():
    x, captured = torch.zeros(256), torch.zeros(256)

    def f(x):
        return x.view(16, 16).transpose(0, 1), captured[:3], x.mul_(2)

    m = measure(f, x)
    assert (m.peak_bytes, m.end_bytes) == (0, 0)
    assert m.ops == {
        "aten.view.default": 1,
        "aten.transpose.int": 1,
        "aten.slice.Tensor": 1,
        "aten.mul_.Tensor": 1,
    }


def test_views_and_expanded_tensors_count_their_storage_once():
    m = measure(lambda: torch.zeros(256).view(16, 16).expand(100, 16, 16)[:, 3])
    assert (m.peak_bytes, m.end_bytes) == (KIB, KIB)


def test_storages_are_followed_after_the_block():
    with Meter() as meter:
        x = torch.zeros(256)
        y = x[:2]
    del x
    assert meter.live_bytes == KIB
    del y
    assert meter.live_bytes == 0
    assert meter.peak_bytes == KIB


def test_plain_backward():
    w = torch.zeros(256, requires_grad=True)

    def f():
        y = w.exp()
        y.backward(torch.ones(256))  # y, the ones, the gradient
        return None

    m = measure(f)
    assert (m.peak_bytes, m.end_bytes) == (3 * KIB, KIB)  # w.grad stays


def test_resized_storages():
    with Meter() as meter:
        x = torch.zeros(256)
        x.resize_(1024)
        assert meter.live_bytes == 4 * KIB
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(2 * KIB)
        assert meter.live_bytes == 2 * KIB
        torch.empty(0, out=x)
    assert meter.peak_bytes == 4 * KIB


def test_an_argument_counts_by_what_it_grows():
    x = torch.zeros(256)
    with Meter() as meter:
        x.resize_(1024)
        assert meter.live_bytes == 3 * KIB
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 3 * KIB


def test_reference_cycles_are_alive_until_collected():
    class Node:
        pass

    gc.disable()
    try:
        with Meter() as meter:
            node = Node()
            node.me, node.x = node, torch.zeros(256)
            del node
            assert meter.live_bytes == KIB
            gc.collect()
            assert meter.live_bytes == 0
    finally:
        gc.enable()


def test_wrapper_subclasses_count_their_inner_tensors():
    x = TwoTensor(torch.zeros(16, 16), torch.zeros(16, 16))
    m = measure(lambda x: x @ x, x)
    assert (m.end_bytes, m.flops) == (2 * KIB, 2 * 2 * 16**3)


def test_tensors_without_memory_count_what_they_stand_for():
    def f():
        x = torch.zeros(1 << 20, 1 << 10, device="meta")
        return (x @ x.T).sum()

    m = measure(f)
    assert m.peak_bytes == 4 * ((1 << 30) + (1 << 40) + 1)
    assert m.flops == 2 * (1 << 50)


def test_fake_tensors_count_what_they_stand_for():
    with torch._subclasses.FakeTensorMode():
        x = torch.zeros(1 << 20)
        assert measure(lambda x: x.exp(), x).end_bytes == 4 << 20
    with Meter() as meter, torch._subclasses.FakeTensorMode():
        x = torch.zeros(1 << 20)
        assert meter.live_bytes == 4 << 20


# FLOPs


def test_flops_of_products():
    a, b, v = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4)
    batch = torch.ones(7, 3, 4)
    for f, flops in [
        (lambda: a @ b, 2 * 3 * 4 * 5),
        (lambda: batch @ b, 2 * 7 * 3 * 4 * 5),
        (lambda: a @ v, 2 * 3 * 4),
        (lambda: torch.addmv(a[:, 0], a, v, beta=2), 2 * 3 * 4),
        (lambda: v @ v, 2 * 4),
        (lambda: F.linear(a, b.T, torch.ones(5)), 2 * 3 * 4 * 5),
        (lambda: F.conv1d(torch.ones(2, 3, 8), torch.ones(5, 3, 4)), 2 * 2 * 5 * 5 * 3 * 4),
        (lambda: a.exp(), 0),
    ]:
        assert measure(f).flops == flops


@pytest.mark.parametrize("causal", [False, True])
def test_flops_of_fused_attention_on_a_cpu(causal):
    q = torch.randn(2, 3, 16, 8, requires_grad=True)  # batch, heads, positions, size
    product = 2 * 2 * 3 * 16 * 16 * 8

    def forward():
        return F.scaled_dot_product_attention(q, q, q, is_causal=causal)

    m = measure(forward)
    assert m.ops["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 1
    assert m.flops == 2 * product
    assert measure(m.result.sum().backward).flops == 5 * product  # two that were, and four less one


# Transforms


def test_per_sample_gradients():
    batch, inputs, outputs = 16, 32, 8
    w, x = torch.randn(inputs, outputs), torch.randn(batch, inputs)

    def loss(w, x):
        y = (x @ w).sin().sum()
        mark("saved")
        return y

    m = measure(vmap(grad(loss), (None, 0)), w, x)
    assert m.result.shape == (batch, inputs, outputs)
    assert m.end_bytes == 4 * batch * inputs * outputs
    # The product is kept for sin; sin's own result is gone; one loss a sample.
    assert m.marks == {"saved": 4 * (batch * outputs + batch)}
    # One product forward, one outer product a sample backward.
    assert m.flops == 2 * batch * inputs * outputs + 2 * batch * inputs * outputs


def test_absent_tangents_hold_no_memory():
    with Meter() as meter:
        zero = torch._efficientzerotensor(256)
    assert (meter.peak_bytes, zero.nbytes) == (0, KIB)


def test_inside_a_transform():
    meters = []

    def f(x):
        with Meter() as meter:
            y = x.exp()
        meters.append(meter)
        return y.sum()

    vmap(grad(f))(torch.zeros(4, 256))
    (meter,) = meters
    assert (meter.peak_bytes, meter.ops) == (4 * KIB, {"aten.exp.default": 1})


# Meters themselves


def test_nested_meters():
    with Meter() as outer:
        x = torch.zeros(256)
        with Meter() as inner:
            y = x + 1
            mark("both")
        z = y @ y
    assert inner.marks == {"both": KIB}
    assert outer.marks == {"both": 2 * KIB}
    assert (inner.peak_bytes, inner.flops) == (KIB, 0)
    assert (outer.peak_bytes, outer.flops) == (2 * KIB + 4, 512)
    assert inner.ops == {"aten.add.Tensor": 1}
    del z


def test_exceptions_leave_no_meter_behind():
    def f(x):
        y = x + 1
        raise KeyError(y)

    x = torch.zeros(256)
    with pytest.raises(KeyError), Meter() as meter:
        f(x)
    torch.zeros(256)
    assert meter.ops == {"aten.add.Tensor": 1}
    assert meter.peak_bytes == KIB

    with Meter() as meter:
        with pytest.raises(RuntimeError):
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        gc.collect()
        assert meter.live_bytes == 0
    assert meter.flops == 0


def test_threads_have_their_own_meters():
    found = {}
    barrier = threading.Barrier(4)

    def work(i):
        with Meter() as meter:
            kept = []
            for _ in range(100):
                kept = [torch.zeros(256) for _ in range(i + 1)]
                barrier.wait()
            found[i] = meter.live_bytes, meter.ops.total()
        del kept

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    with Meter() as here:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: ((i + 1) * KIB, 100 * (i + 1)) for i in range(4)}
    assert here.ops.total() == 0


def test_meters_do_not_leak():
    with Meter() as meter:
        for _ in range(100):
            torch.zeros(8).exp()
    assert meter.live_bytes == 0
    assert not meter._tracked


def test_checkpoint_saves_the_inputs_of_its_blocks():
    """torch.utils.checkpoint in plain eager, in numbers computed by hand."""
    w = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(64, 64)
    size, product = 4 * 64 * 64, 2 * 64**3

    def train(wrap):
        y = x
        for _ in range(4):
            y = wrap(lambda y: (y @ w).sin().cos(), y)
        loss = y.sum()
        mark("saved")
        (gradient,) = torch.autograd.grad(loss, w)
        return gradient

    plain = measure(train, lambda f, y: f(y))
    checkpointed = measure(train, partial(checkpoint, use_reentrant=False))
    torch.testing.assert_close(plain.result, checkpointed.result, rtol=0, atol=0)
    # A block keeps its input (the first is x, which was there), what sin reads and what cos reads.
    # The last block's output is a variable of `train`.
    assert plain.marks["saved"] == 4 * 3 * size + 4
    assert checkpointed.marks["saved"] == 4 * size + 4
    # Forward 4, backward 4 for w and 3 for the inputs. Recomputed: all 4.
    assert plain.flops == 11 * product
    assert checkpointed.flops == 15 * product
    assert plain.end_bytes == checkpointed.end_bytes == size
