"""What is kept elsewhere: the same derivatives, and memory that is not the process's own."""

import gc
import os
import re
import sys
import tempfile

import pytest
import torch
from oracles import tensor
from support import assert_same
from torch.func import functionalize, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, remat, scan
from funcckpt.eager import selective
from funcckpt.errors import InputError
from funcckpt.policies import offload
from funcckpt.policies.offload import fetch, store
from funcckpt.tape import recording

F64 = torch.float64


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_each_kind_of_tensor_comes_back_as_it_was(dtype, shape, place):
    x = tensor(*shape).to(dtype)
    back = fetch(store({"x": x, "n": 3}, place))
    assert_same(back, {"x": x, "n": 3})
    assert back["x"].data_ptr() != x.data_ptr() or x.numel() == 0
    assert back["x"].requires_grad is False


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is read from /proc")
def test_the_carries_are_mapped_files_and_go_after_the_backward():
    def files():
        # Named after the directory for temporary files, and deleted already.
        with open("/proc/self/maps") as maps:
            return len(set(re.findall(r"\S*funcckpt-\S+ \(deleted\)", maps.read())))

    seen = []

    def step(x, _):
        seen.append(files())
        return torch.sin(x), None

    before = set(os.listdir(tempfile.gettempdir()))
    k = 4
    x = torch.ones(100_000, dtype=F64)
    grad(lambda x: scan(step, x, length=30, checkpoints=k, offload="disk")[0].sum())(x)
    assert max(seen) == k
    gc.collect()
    assert files() == 0
    new = {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("funcckpt-")}
    assert not new


def test_files_under_functionalize():
    run = lambda place: functionalize(
        grad(lambda x: scan(lambda c, _: (c.sin(), None), x, length=3, offload=place)[0].sum())
    )(tensor(3))
    assert_same(run("host"), run(None))
    with pytest.raises(InputError, match=r'functionalize\. Pass "host"'):
        run("disk")
    with pytest.raises(InputError, match="offload='tape' is not None, 'host' or 'disk'"):
        scan(lambda c, x: (c, None), tensor(3), length=3, offload="tape")


def test_files_in_a_batched_backward():
    """The vmap of plain autograd lets nobody reach the memory of a tensor."""

    w = tensor(3, seed=1, requires_grad=True)

    def jacobian(place):
        y = (x := tensor(3, requires_grad=True)).clone()
        step = torch.enable_grad()(lambda g: scan(lambda c, _: (c * w, None), g, length=6, offload=place)[0])
        y.register_hook(step)
        return torch.autograd.grad(y, x, torch.eye(3, dtype=F64), is_grads_batched=True)

    assert_same(jacobian("disk"), jacobian(None))


class Late(TorchDispatchMode):
    """A stand-in for a stream of an accelerator. It copies when somebody waits for that, and no earlier."""

    def __init__(self):
        super().__init__()
        self.copies = []
        # How many there were, and how many were left to do at each wait.
        self.count = 0
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.copies.append(lambda: args[0].data.copy_(args[1]))
        self.count += 1
        return args[0]

    def wait_stream(self, other):
        pass

    def record_event(self):
        return Event(self, self.copies[-1])

    def do(self, copy):
        self.waits.append(len(self.copies))
        while copy in self.copies:
            self.copies.pop(0)()


class Event:
    def __init__(self, stream, copy):
        self.stream, self.copy = stream, copy

    def synchronize(self):
        self.stream.do(self.copy)


class Current:
    """The stream on which all else is done at once."""

    @staticmethod
    def wait_event(event):
        event.synchronize()


@pytest.fixture
def late(monkeypatch):
    """As on a GPU, as far as the order goes."""
    stream = Late()
    for module in (recording, selective):
        monkeypatch.setattr(module, "is_far", lambda x: True)
    monkeypatch.setattr(offload, "_side_stream", lambda device: stream)
    monkeypatch.setattr(offload, "_host_memory", lambda x, pinned: torch.empty_like(x))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Current)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    return stream


everything = lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD
contexts = lambda: create_selective_checkpoint_contexts(everything)
OFFLOADING = {
    "remat": lambda f: remat(f, policy=everything),
    "hooks": lambda f: lambda *args: checkpoint(f, *args, context_fn=contexts),
}
read_only = lambda x, w: (x @ w).tanh().exp().sin().exp()


def writes_inside(x, w):
    y = x @ w
    z = y.exp()
    return y.mul_(2).sin() + z


@pytest.mark.parametrize("f", [read_only, writes_inside])
@pytest.mark.parametrize("wrap", OFFLOADING.values(), ids=OFFLOADING)
def test_copies_that_come_late(late, wrap, f, monkeypatch):
    """What is copied is what was there, whoever writes to it; into pinned memory."""
    seen = []
    host_memory = lambda x, pinned: seen.append(pinned) or torch.empty_like(x)
    monkeypatch.setattr(offload, "_host_memory", host_memory)
    x, w = tensor(3, 3).requires_grad_(), tensor(3, 3).requires_grad_()
    y = wrap(f)(x, w)
    z = y.sum()
    y.detach().zero_()
    assert_same(torch.autograd.grad(z, [x, w]), torch.autograd.grad(f(x, w).sum(), [x, w]))
    assert late.count >= 2 and all(seen)
    per_sample = lambda f: vmap(grad(lambda x, w: f(x, w).sum(), (0, 1)), (0, None))(
        tensor(4, 3, 3), w.detach()
    )
    if f is read_only:
        assert_same(per_sample(wrap(f)), per_sample(f))


@pytest.mark.parametrize("wrap", OFFLOADING.values(), ids=OFFLOADING)
def test_copies_back_are_ahead_of_their_use(late, wrap):
    """All are begun before the first one is waited for."""
    y = wrap(read_only)(tensor(3, 3).requires_grad_(), tensor(3, 3))
    there = late.count
    late.waits.clear()
    y.sum().backward()
    assert there >= 3 and late.waits[0] == there and late.count == 2 * there
