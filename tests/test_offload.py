"""Carries that are kept elsewhere: the same derivatives, and memory that is not the process's own."""

import doctest
import gc
import os
import re
import sys
import tempfile

import pytest
import torch
from support import assert_same
from test_scan import SCHEDULES, TRANSFORMS, plain_scan, rnn, tensor
from torch.func import functionalize, grad

from funcckpt import InputError, fori_loop, scan, while_loop
from funcckpt.offload import fetch, store

F64 = torch.float64


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform, place):
    run = TRANSFORMS[transform]
    got = run(lambda *args: rnn(scan, *args, checkpoints=3, offload=place))
    assert_same(got, run(lambda *args: rnn(plain_scan, *args)))


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_eager_backward(options):
    def run(loop, **more):
        leaves = [tensor(3, 3).requires_grad_(), tensor(3).requires_grad_(), tensor(11, 3).requires_grad_()]
        rnn(loop, *leaves, **options, **more).backward()
        return [leaf.grad for leaf in leaves]

    assert_same(run(scan, offload="disk"), run(plain_scan))


def test_other_loops():
    x = tensor(3)
    want = grad(lambda x: x.sin().sin().sin().sum())(x)
    assert_same(grad(lambda x: fori_loop(0, 3, lambda i, x: x.sin(), x, offload="disk").sum())(x), want)
    body = lambda c: (c[0] + 1, c[1].sin())
    run = lambda x: while_loop(lambda c: c[0] < 3, body, (0, x), offload="disk")[1].sum()
    assert_same(grad(run)(x), want)


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
    with pytest.raises(InputError, match=r'functionalize cannot\. Take "host"'):
        run("disk")


def test_wrong_place():
    with pytest.raises(InputError, match="offload='tape' is none of None, 'host' and 'disk'"):
        scan(lambda c, x: (c, None), tensor(3), length=3, offload="tape")


def test_the_example():
    assert doctest.testmod(sys.modules["funcckpt.offload"]).failed == 0
