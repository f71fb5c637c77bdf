"""Random programs of checkpoints, scopes, selective contexts and hooks inside of each other.

A program is drawn as data first, so that who runs it cannot change it. What it is compared with is the same
program with all wrappers taken away, in float64: values, gradients of leaves and parameters, buffers, and
where the random stream ends.
"""

import functools
import random
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support import assert_same
from torch import nn
from torch.autograd import forward_ad

from funcckpt import CheckpointPolicy, checkpoint, checkpoint_scope, inner_grad, patched, remat
from funcckpt._torch import autograd, functorch
from funcckpt.eager import selective
from funcckpt.eager.selective import create_selective_checkpoint_contexts
from funcckpt.errors import MutationError
from funcckpt.policies import dots_saveable, everything_saveable

from .implementations import D, copying, in_a_thread, leaf, theirs

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=D)
        self.batch_norm = nn.BatchNorm1d(4, dtype=D)
        self.layer_norm = nn.LayerNorm(4, dtype=D)
        self.cell = nn.GRUCell(4, 4, dtype=D)
        self.position = nn.Parameter(torch.zeros(4, 4, dtype=D))
        self.register_buffer("mean", torch.zeros(4, dtype=D))

    def average(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def in_place(x):
    y = x.clone()
    y[1:].mul_(2)
    return F.relu(y.add_(x.sin()), inplace=True) + x


def without_grad(x):
    with torch.no_grad():
        scale = F.dropout(x.exp(), 0.2).mean()
    return x * scale.tanh()


def inner_gradient(x):
    (g,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
    return x + g.tanh()


def caught(x):
    try:
        x = x.sin() * 2
        raise KeyError
    except KeyError:
        return x.exp().tanh()


STEPS = {
    "linear": lambda m, x: m.linear(x).tanh(),
    "batch_norm": lambda m, x: m.batch_norm(x),
    "layer_norm": lambda m, x: m.layer_norm(x),
    "cell": lambda m, x: m.cell(x, x.sin()),
    "position": lambda m, x: (x + m.position).tanh(),
    "average": lambda m, x: m.average(x),
    "functional_call": lambda m, x: torch.func.functional_call(
        m.linear, {"weight": x.sin(), "bias": x[0] * 2}, (x,)
    ).tanh(),
    "dropout": lambda m, x: F.dropout(x.exp(), 0.3).clamp(max=2),
    "noise": lambda m, x: x + torch.rand_like(x) * x,
    "in_place": lambda m, x: in_place(x),
    "without_grad": lambda m, x: without_grad(x),
    "inner_gradient": lambda m, x: inner_gradient(x),
    "inner_grad": lambda m, x: (
        x - inner_grad(lambda z: (z.sin() * m.position.cos()).sum())(x) * m.position.exp()
    ),
    "transform": lambda m, x: x * torch.func.grad(lambda z: (z.sin() * m.linear.bias * z).sum())(x),
    "layers": lambda m, x: functools.reduce(lambda x, n: (x / n).tanh(), (1, 2, 3), x),
    "caught": lambda m, x: caught(x),
    "matmul": lambda m, x: (x @ x.t()).softmax(-1) @ x,
    "views": lambda m, x: torch.cat([x[:2].t().reshape(2, 4), x[2:]]).square().tanh(),
}
POLICIES = {
    "save": lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "offload": lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_CPU_OFFLOAD,
    "list": [aten.mm.default, aten.sin.default, aten.rand_like.default, aten.exp.default],
    "recompute": lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE,
}


@contextmanager
def scope_left_by_an_exception():
    with suppress(LookupError), checkpoint_scope():
        yield
        raise LookupError


def under_patch(f, *args):
    with patched():
        return theirs(f, *args)


WRAPPERS = {
    "checkpoint": checkpoint,
    "to the end": functools.partial(checkpoint, early_stop=False),
    "debug": functools.partial(checkpoint, debug=True),
    "scope": checkpoint_scope,
    "left scope": scope_left_by_an_exception,
    "hooks": copying,
    "patched": under_patch,
    "theirs": theirs,
    "remat": lambda f, x: remat(f)(x),
    **{
        f"policy {name}": lambda f, x, policy=policy: remat(f, policy=policy)(x)
        for name, policy in {
            "all": everything_saveable,
            "dots": dots_saveable,
            "some": [aten.tanh.default, aten.exp.default, aten.mul.Tensor],
        }.items()
    },
    **{
        f"selective {name}": functools.partial(
            checkpoint,
            context_fn=functools.partial(
                create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True
            ),
        )
        for name, policy in POLICIES.items()
    },
}
CONTEXTS = {"scope", "left scope", "hooks"}


def draw_block(draw, depth, steps, wrappers):
    """Names of steps, and of wrappers with the blocks inside of them."""
    block = []
    for _ in range(draw.randint(1, 4)):
        if depth and draw.random() < 0.55:
            block.append((draw.choice(wrappers), draw_block(draw, depth - 1, steps, wrappers)))
        else:
            block.append(draw.choice(steps))
    return block


def run_block(block, model, x, plain):
    for part in block:
        if isinstance(part, str):
            x = STEPS[part](model, x)
            continue
        name, inner = part
        if plain:
            x = run_block(inner, model, x, plain)
        elif name in CONTEXTS:
            with WRAPPERS[name]():
                x = run_block(inner, model, x, plain)
        else:
            x = WRAPPERS[name](lambda x, inner=inner: run_block(inner, model, x, plain), x)
    return x


def run(program, seed, plain, how):
    torch.manual_seed(seed)
    model = Model()
    x = torch.randn(4, 4, dtype=D, requires_grad=True)
    leaves = [x, *model.parameters()]
    grad = functools.partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
    y = run_block(program, model, x * 1, plain)
    z = run_block(program[:2], model, y, plain).square()
    after = torch.rand(2)
    loss = z.sum() + y.tanh().sum()
    if how == "once":
        gradients = grad(loss, leaves)
    elif how == "retained":
        gradients = [grad(loss, leaves, retain_graph=True), grad(loss, leaves)]
    elif how == "parts":
        gradients = [grad(y.sum(), leaves, retain_graph=True), grad(z.sum(), leaves)]
    elif how == "twice":
        first = grad(loss, leaves, create_graph=True)
        gradients = [first, grad(sum(g.square().sum() for g in first), leaves)]
    elif how == "thread":
        gradients = in_a_thread(lambda: grad(loss, leaves))
    elif how == "under no_grad and hooks":
        with torch.no_grad(), copying():
            gradients = grad(loss, leaves)
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, torch.detach, [y, z, gradients, list(model.buffers()), after, torch.rand(2)]
    )


ALL = sorted(WRAPPERS)
# What goes through a backward once, and not through a backward of the backward.
ONCE = [name for name in ALL if not name.startswith("selective")]
WAYS = {
    "once": ALL,
    "thread": ALL,
    "under no_grad and hooks": ALL,
    "retained": ONCE,
    "parts": ONCE,
    "twice": ONCE,
}
# Torch's checkpoint recomputes from what f has updated, and updates it again.
UPDATES = {"average", "batch_norm"}
GRADIENTS = {"inner_gradient", "inner_grad", "transform"}
# Torch refuses transforms inside of hooks.
HOOKS = {"scope", "left scope", "hooks", "theirs", "patched"}
FAMILIES = {
    "pure": (set(STEPS) - UPDATES - GRADIENTS - {"in_place"}, set(ALL)),
    "in place": (set(STEPS) - UPDATES - GRADIENTS, set(ALL)),
    "gradients inside": (set(STEPS) - UPDATES - {"transform"}, set(ALL)),
    "transforms inside": (set(STEPS) - UPDATES, set(ALL) - HOOKS),
    "updates": (set(STEPS) - GRADIENTS, set(ALL) - {"theirs"}),
}


@pytest.fixture(autouse=True)
def as_where_nothing_is_compiled(monkeypatch):
    """Other tests compile; remat then leaves out nothing."""
    monkeypatch.setattr(functorch, "has_compiled", lambda: False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("seed", range(8))
def test_as_without(seed, how, family, monkeypatch):
    monkeypatch.setattr(selective, "is_far", lambda x: True)
    steps, wrappers = FAMILIES[family]
    draw = random.Random(f"{seed} {how} {family}")
    program = draw_block(draw, 3, sorted(steps), [name for name in WAYS[how] if name in wrappers])
    expected = run(program, seed, True, how)
    try:
        found = run(program, seed, False, how)
    except MutationError:
        # A scope that has read the buffer, and remat of f that updates it, say so.
        assert family == "updates"
    else:
        assert_same(found, expected)


FOUND = [
    # What others than f do inside of f, and how often, is no operator of f: copies of hooks and of regions.
    [("checkpoint", [("left scope", ["linear"]), ("selective save", [("hooks", ["matmul"]), "noise"])])],
    [("left scope", [("remat", [("remat", ["linear"])])])],  # hooks give another parameter than was captured
    [("checkpoint", [("remat", ["linear"])])],  # as the first call in a process
    [("checkpoint", ["layers", ("selective save", ["inner_gradient"])])],
    [("policy all", ["inner_gradient"]), ("scope", ["layers"])],
]


@pytest.mark.parametrize("how", ["once", "under no_grad and hooks", "retained"])
@pytest.mark.parametrize("program", FOUND, ids=range(len(FOUND)))
def test_as_without_found(program, how, monkeypatch):
    if how == "retained" and "selective" in repr(program):
        how = "once"
    monkeypatch.setattr(selective, "is_far", lambda x: True)
    autograd.references_of_private_leaf.cache_clear()
    assert_same(run(program, 0, False, how), run(program, 0, True, how))


@pytest.mark.parametrize("inner", [checkpoint, lambda f, x: remat(f)(x)])
def test_a_backward_in_plain_forward_mode(inner):
    """Checkpoints do nothing there, but the inner one did something in the forward."""
    f, x = lambda x: x.sin().exp(), leaf(3)
    y = checkpoint(lambda x: inner(f, x).tanh(), x)
    with forward_ad.dual_level():
        ct = forward_ad.make_dual(torch.ones_like(y), y.detach().cos())
        found = forward_ad.unpack_dual(torch.autograd.grad(y, x, ct)[0])
        expected = forward_ad.unpack_dual(torch.autograd.grad(f(x).tanh(), x, ct)[0])
        assert_same([*found], [*expected])
