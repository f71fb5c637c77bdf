"""checkpoint under transforms, around them, and in forward mode: the functional path."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support import Changing, Counter, assert_same
from torch.func import grad, vmap
from torch.utils.checkpoint import CheckpointError

import funcckpt
from funcckpt import checkpoint
from funcckpt.errors import OptionError
from funcckpt.meter import Meter

from .implementations import D, gradients, leaf


def chain(x, w):
    for _ in range(2):
        x = torch.tanh(x @ w)
    return x


def test_recomputes_under_transforms():
    f = Counter(torch.sin)
    grad(lambda x: checkpoint(f, x).sum())(torch.ones(3))
    assert f.calls == 2


# -- f that uses transforms itself, in plain eager code ---------------------------------------


def inner_gradient(x, w):
    return torch.sin(grad(lambda x: chain(x, w).sum())(x) @ w)


def test_f_with_a_transform_inside():
    x, w = leaf(4, 3), leaf(3, 3)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.utils.checkpoint.checkpoint(inner_gradient, x, w, use_reentrant=False)
    assert_same(gradients(inner_gradient, x, w, checkpoint=checkpoint), gradients(inner_gradient, x, w))


def test_random_streams_when_started_anew():
    def f(x):
        x = F.dropout(x, 0.5)
        return vmap(grad(torch.sin))(x) * torch.rand_like(x)

    def run(call):
        torch.manual_seed(4)
        x = torch.ones(16, dtype=D, requires_grad=True)
        y = call(f, x)
        after = torch.rand(2)
        y.sum().backward()
        return y.detach(), x.grad, after, torch.rand(2)

    assert_same(run(checkpoint), run(lambda f, x: f(x)))


def test_transform_inside_under_hooks_of_the_caller():
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        checkpoint(inner_gradient, leaf(4, 3), leaf(3, 3))


def test_other_errors_of_f_are_its_own():
    def f(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        checkpoint(f, leaf(3))


# -- options mean the same --------------------------------------------------------------------------


def test_determinism_check():
    with pytest.raises(CheckpointError, match=r"float64\[1\]|\[1\]"):
        grad(lambda x: checkpoint(Changing(torch.sin, lambda x: x.sin()[:1]), x).sum())(
            torch.ones(3, dtype=D)
        )
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        grad(lambda x: checkpoint(torch.sin, x, determinism_check="all"))(torch.ones(()))


@pytest.mark.parametrize(
    "contexts",
    [
        lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.sin.default]),
        lambda: (nullcontext(), nullcontext()),
    ],
)
def test_contexts_of_others_cannot_be_honoured(contexts):
    with pytest.raises(OptionError, match="context_fn"):
        grad(lambda x: checkpoint(torch.sin, x, context_fn=contexts))(torch.ones(()))


def test_a_policy_is_honoured():
    """Of the contexts it is taken, and given to remat."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return op is torch.ops.aten.sin.default

    contexts = lambda: funcckpt.create_selective_checkpoint_contexts(policy)
    with Meter() as meter:
        y = grad(lambda x: checkpoint(lambda x: torch.sin(x).exp(), x, context_fn=contexts))(torch.ones(()))
    assert torch.ops.aten.sin.default in asked and meter.ops["aten.sin.default"] == 1
    assert y == torch.ones(()).cos() * torch.ones(()).sin().exp()


def test_the_functional_path_knows_nothing_of_this_one():
    script = (
        "import sys, types\n"
        "package = types.ModuleType('funcckpt')\n"
        f"package.__path__ = [{funcckpt.__path__[0]!r}]\n"
        "sys.modules['funcckpt'] = package\n"
        "import funcckpt.remat, funcckpt.meter, funcckpt.core.net, funcckpt.world, funcckpt.core.dispatch\n"
        "print([name for name in sys.modules if name.startswith('funcckpt.eager')])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr
