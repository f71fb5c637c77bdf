"""The meter: bytes, FLOPs and ops against numbers computed by hand."""

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from funcckpt.meter import Meter, mark, measure, storages
from funcckpt.tape.recompute import Placeholder

KIB = 1024  # 256 floats
BEFORE = torch.zeros(256)


def alive_at_once():
    a = BEFORE.exp()  # 1
    b = a.sin()  # 2
    del a
    c = b.cos()  # 2
    return c + b  # 3


def plain_backward():
    w = torch.zeros(256).requires_grad_()
    w.exp().backward(torch.ones(256))  # w, its exponential, the ones, the gradient
    return w.grad


def of_meta():
    x = torch.zeros(1 << 20, 1 << 10, device="meta")
    return (x @ x.T).sum()


def of_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        return torch.zeros(1 << 20)


TWO = TwoTensor(torch.zeros(16, 16), torch.zeros(16, 16))
SPARSE = torch.eye(256).to_sparse()
# Peak, bytes at the end.
BYTES = {
    "alive at once": (alive_at_once, 3 * KIB, KIB),
    "there before": (lambda: (BEFORE.view(16, 16).transpose(0, 1), BEFORE[:3], BEFORE.mul_(2)), 0, 0),
    "views": (lambda: torch.zeros(256).view(16, 16).expand(100, 16, 16)[:, 3], KIB, KIB),
    "a backward": (plain_backward, 4 * KIB, KIB),
    "inner tensors": (lambda: TWO @ TWO, 2 * KIB, 2 * KIB),
    "meta": (of_meta, 4 * ((1 << 30) + (1 << 40) + 1), 4),
    "fake": (of_fake_tensors, 4 << 20, 4 << 20),
    "absent tangents": (lambda: torch._efficientzerotensor(256), 0, 0),
    "their products": (lambda: torch.ops.aten.mul.Scalar(torch._efficientzerotensor(256), 2.0), 0, 0),
    "a tensor of numbers": (lambda: torch.tensor([0.0] * 256), KIB, KIB),
    "sparse": (lambda: SPARSE * 2, 5 * KIB, 5 * KIB),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name):
    f, peak, end = BYTES[name]
    m = measure(f)
    assert (m.peak_bytes, m.end_bytes) == (peak, end)


def test_storages_are_followed_after_the_block(request):
    class Node:
        pass

    request.addfinalizer(gc.enable)
    gc.disable()
    with Meter() as meter:
        x = torch.zeros(256)
        y, node = x[:2], Node()
        node.me, node.x = node, torch.zeros(256)  # alive until it is collected
    del x, node
    assert meter.live_bytes == 2 * KIB
    gc.collect()
    assert meter.live_bytes == KIB
    del y
    assert (meter.live_bytes, meter.peak_bytes, len(meter._tracked)) == (0, 2 * KIB, 0)


@pytest.mark.parametrize("before", [0, 1])
def test_resized_storages(before):
    """An argument counts by what it grows."""
    there = torch.zeros(256)
    with Meter() as meter:
        x = there if before else torch.zeros(256)
        x.resize_(1024)
        assert meter.live_bytes == (4 - before) * KIB
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(2 * KIB)
        assert meter.live_bytes == (2 - before) * KIB
        torch.empty(0, out=x)
    assert meter.peak_bytes == (4 - before) * KIB


A, M, V, BATCH = torch.ones(3, 4), torch.ones(4, 5), torch.ones(4), torch.ones(7, 3, 4)
Q = torch.randn(2, 3, 16, 8, requires_grad=True)  # batch, heads, positions, size
FLOPS = [
    (lambda: A @ M, 2 * 3 * 4 * 5),
    (lambda: BATCH @ M, 2 * 7 * 3 * 4 * 5),
    (lambda: A @ V, 2 * 3 * 4),
    (lambda: torch.addmv(A[:, 0], A, V, beta=2), 2 * 3 * 4),
    (lambda: V @ V, 2 * 4),
    (lambda: F.linear(A, M.T, torch.ones(5)), 2 * 3 * 4 * 5),
    (lambda: F.conv1d(torch.ones(2, 3, 8), torch.ones(5, 3, 4)), 2 * 2 * 5 * 5 * 3 * 4),
    (lambda: TWO @ TWO, 2 * 2 * 16**3),
    (lambda: A.exp(), 0),
]


def test_flops():
    for f, flops in FLOPS:
        assert measure(f).flops == flops
    with torch.inference_mode():
        m = measure(lambda: F.linear(BATCH, M.T))
    assert m.flops == 2 * 7 * 3 * 4 * 5 and "aten.linear.default" not in m.ops
    of_samples = torch.func.vmap(torch.func.grad(lambda x: (x @ M).sin().sum()))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), FlopCounterMode(display=False) as counter:
            m = measure(of_samples, BATCH)
        assert m.flops == counter.get_total_flops() > 0 and "aten.matmul.default" not in m.ops
    product = 2 * 2 * 3 * 16 * 16 * 8
    for causal in (False, True):
        m = measure(partial(F.scaled_dot_product_attention, Q, Q, Q, is_causal=causal))
        assert m.ops["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 1
        assert m.flops == 2 * product
        assert measure(m.result.sum().backward).flops == 5 * product  # two that were, and four less one


def test_nested_meters_and_exceptions():
    with Meter() as outer:
        x = torch.zeros(256)
        with pytest.raises(KeyError), Meter() as inner:
            y = x + 1
            mark("both")
            raise KeyError
        z = y @ (y + y)
        with pytest.raises(RuntimeError):
            torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert inner.marks == {"both": KIB}
    assert outer.marks == {"both": 2 * KIB}
    assert (inner.peak_bytes, inner.flops, inner.ops) == (KIB, 0, {"aten.add.Tensor": 1})
    assert (outer.peak_bytes, outer.flops, outer.ops["aten.add.Tensor"]) == (3 * KIB + 4, 512, 2)
    del z


def test_what_stands_for_a_skipped_result_has_no_memory():
    replay = SimpleNamespace(placeholders=[])
    x = Placeholder(torch.empty(3, device="meta"), torch.device("cpu"), replay)
    with Meter() as meter:
        views = [x.view(3, 1), x[:2]]
    assert not [*storages([x, *views])] and meter.live_bytes == meter.peak_bytes == 0
