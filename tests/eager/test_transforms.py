"""checkpoint under transforms, around them, and in forward mode: the functional path."""

from contextlib import nullcontext
from contextvars import ContextVar

import pytest
import torch
import torch.nn.functional as F
from support import Changing, assert_same
from torch import nn
from torch.func import grad, jvp, linearize, vmap
from torch.utils.checkpoint import CheckpointError

from funcckpt import checkpoint, remat
from funcckpt.errors import MutationError, OptionError
from funcckpt.policies import nothing_saveable

from .implementations import D, leaf, plain, theirs


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize itself
def test_linearize():
    f, x = lambda x: torch.sin(x) * x, leaf(3).detach()
    out, push = linearize(lambda x: checkpoint(f, x), x)
    assert_same((out, push(x)), jvp(f, (x,), (x,)))


def test_f_with_a_transform_inside():
    """Under hooks torch.func refuses, so that f is run again, as remat: buffers and streams are put back."""

    def run(call):
        torch.manual_seed(4)
        norm, x = nn.BatchNorm1d(3, dtype=D), leaf(8, 3)

        def f(x):
            x = norm(F.dropout(x, 0.5))
            return vmap(grad(lambda x: (x.sin() * x).sum()))(x) * torch.rand_like(x)

        y = call(f, x)
        after = torch.rand(2)
        y.sum().backward()
        return y.detach(), x.grad, list(norm.buffers()), after, torch.rand(2)

    assert_same(run(checkpoint), run(plain))
    x = leaf(3)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        checkpoint(lambda x: grad(lambda x: x.sin().sum())(x), x)
    state = torch.zeros(3, dtype=D)
    with pytest.raises(MutationError, match="Return the new value"):
        checkpoint(lambda x: grad(lambda z: z.sin().sum())(x + state.add_(1)), x)


def test_what_f_assigns_before_a_transform_inside():
    def run(call):
        torch.manual_seed(5)
        counter, x = nn.Module(), leaf(3)
        counter.n, counter.sums, counter.mean = 0, {"x": 0.0}, torch.zeros(3, dtype=D)

        def f(x):
            counter.n += 1
            counter.sums["x"] += x.sum().item()
            counter.mean = counter.mean / 2 + x.detach()
            return grad(lambda x: x.sin().sum())(x) * counter.n + counter.mean * counter.sums["x"]

        y = call(f, call(f, x))
        y.sum().backward()
        return y.detach(), x.grad, counter.n, counter.sums, counter.mean

    assert_same(run(checkpoint), run(plain))


def test_a_context_variable_that_f_sets_before_a_transform_inside():
    calls = ContextVar("calls", default=None)

    def f(x):
        calls.set((calls.get() or 0) + 1)
        return grad(lambda z: z.sin().sum())(x) * calls.get()

    x = leaf(3)
    y = checkpoint(f, x)
    assert calls.get() == 1
    assert_same(torch.autograd.grad(y.sum(), x)[0], -x.detach().sin())


@pytest.mark.parametrize("around", [remat, lambda f: lambda x: checkpoint(f, x, policy=nothing_saveable)])
def test_torchs_checkpoint_between_ours_in_a_batched_backward(around):
    f = around(lambda x: theirs(lambda x: checkpoint(torch.exp, x), x))
    y = f(x := leaf(3))
    (jacobian,) = torch.autograd.grad(y, x, torch.eye(3, dtype=D), is_grads_batched=True)
    assert_same(jacobian, y.detach().diag())


@pytest.mark.parametrize("transform", [grad, vmap, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_a_backward_inside_of_a_transform(transform):
    """Of a checkpoint outside of it, whose recomputation needs hooks."""
    w, x = leaf(3, 3), leaf(4, 3)

    def run(call):
        y = call(lambda x: (torch.dropout(x, 0.5, True) @ w).tanh(), x)
        norm = lambda ct: torch.autograd.grad(y, w, ct, retain_graph=True)[0].square().sum()
        return transform(norm)(torch.ones(*([2] if transform is vmap else []), 4, 3, dtype=D))

    torch.manual_seed(0)
    actual = run(checkpoint)
    torch.manual_seed(0)
    assert_same(actual, run(plain))
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_a_captured_tensor_at_the_address_of_an_earlier_one():
    for _ in range(40):  # by chance, in two of five
        w = leaf(2, 2)
        loss = lambda x, w: checkpoint(lambda x: remat(lambda a: (a @ w).tanh())(x).sum(), x)
        torch.autograd.functional.hessian(loss, (leaf(2, 2), w))


def test_errors():
    shorter, three = Changing(torch.sin, lambda x: x.sin()[:1]), torch.ones(3, dtype=D)
    with pytest.raises(CheckpointError, match=r"float64\[1\]|\[1\]"):
        grad(lambda x: checkpoint(shorter, x).sum())(three)
    of_torch = torch.utils.checkpoint.create_selective_checkpoint_contexts
    for contexts in (lambda: of_torch([torch.ops.aten.sin.default]), lambda: (nullcontext(), nullcontext())):
        with pytest.raises(OptionError, match="context_fn"):
            grad(lambda x: checkpoint(torch.sin, x, context_fn=contexts).sum())(three)  # noqa: B023
