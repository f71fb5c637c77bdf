"""What is kept, exactly: records of functions small enough to be counted by hand, and the meter's bytes."""

import functools
import inspect
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compositions.programs import draw
from compositions.test_random_programs import inputs
from support import no_remat, outcome, seeds
from torch import nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from funcckpt import checkpoint, checkpoint_name, checkpoint_scope, explain, remat
from funcckpt.eager.selective import create_selective_checkpoint_contexts
from funcckpt.errors import InputError
from funcckpt.inspect.residuals import print_saved_residuals, saved_residuals
from funcckpt.meter import Meter

FILE = Path(__file__).name
N, D, H, B = 3, 4, 8, 5  # rows, features in, features hidden, batch
f32 = torch.float32


def block(params, x):
    h = torch.tanh(x @ params["w1"])
    return checkpoint_name(h * h, "square") @ params["w2"]


def line(function, text):
    """Where in this file a function has a line of code, as a record says it."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, code in enumerate(lines) if text in code]
    return f"{FILE}:{found} ({function.__name__})"


TANH = line(block, "tanh")
SQUARE = line(block, "square")
loss = lambda params, x: block(params, x).exp().sum()
rematted = lambda params, x: remat(block)(params, x).exp().sum()
hooked = lambda params, x: checkpoint(block, params, x).exp().sum()


@pytest.fixture
def params():
    return {"w1": torch.randn(D, H), "w2": torch.randn(H, 2)}


def rows(*args, **kwargs):
    return [(r.dtype, r.shape, r.bytes, r.source, r.name) for r in saved_residuals(*args, **kwargs)]


W1 = (f32, (D, H), 4 * D * H, "argument params['w1']", None)
W2 = (f32, (H, 2), 4 * H * 2, "argument params['w2']", None)
X = (f32, (N, D), 4 * N * D, "argument x", None)
XS = (f32, (B, N, D), 4 * B * N * D, "argument x", None)


def output(operator, where, width, *batch, name=None):
    rows = (batch or (1,))[0] * N
    return f32, (*batch, N, width), 4 * rows * width, f"output of aten.{operator} at {where}", name


tanh = functools.partial(output, "tanh", TANH, H)
square = functools.partial(output, "mul", SQUARE, H, name="square")
exp = lambda function, *batch: output("exp", line(function, "exp()"), 2, *batch)


PER_SAMPLE = functools.partial(vmap, in_dims=(None, 0))
OF_LOSS = [tanh(), square(), exp(loss)]
RECORDS = {
    # With respect to all arguments, since none requires grad.
    "plain": (loss, [W1, W2, X, *OF_LOSS]),
    "grad": (grad(loss), [W2, X, *OF_LOSS]),
    # Batched, what belongs to each sample; the parameters as they are.
    "vmap of grad": (PER_SAMPLE(grad(loss)), [W2, XS, tanh(B), square(B), exp(loss, B)]),
    "remat": (rematted, [W1, W2, X, exp(rematted)]),
    "vmap of grad of remat": (PER_SAMPLE(grad(rematted)), [W1, W2, XS, exp(rematted, B)]),
    "remat of the whole": (grad(remat(loss)), [W1, W2, X]),
    "hooks": (hooked, [W1, W2, X, exp(hooked)]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(name, params):
    f, expected = RECORDS[name]
    assert rows(f, params, torch.ones(B, N, D) if "vmap" in name else torch.ones(N, D)) == expected


def test_what_requires_grad_decides(params):
    """x does not, so that w1 is not needed."""
    params = {name: p.requires_grad_() for name, p in params.items()}
    assert rows(loss, params, torch.ones(N, D)) == [W2, X, *OF_LOSS]


def test_under_a_transform(params):
    """Called where a transform is active, it sees below it."""
    seen = []
    vmap(lambda x: seen.append(rows(grad(loss), params, x)) or x)(torch.ones(B, N, D))
    assert [row[2] for row in seen[0]] == [row[2] for row in (W2, XS, tanh(B), square(B), exp(loss, B))]


def test_training_step():
    model = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 2))

    def step(x):
        model(x).sum().backward()

    assert [r.source for r in saved_residuals(step, torch.ones(N, D))] == [
        "argument x",
        "parameter 'weight' of module '2' of closure variable 'model'",
        f"output of aten.tanh at {line(step, 'model(x)')}",
    ]
    assert model[0].weight.grad is not None  # f is run as it is


SCALE, TWO = torch.full((7,), 2.0), torch.tensor(2.0)


def with_constant(x):
    """It is made in f, and no node of autograd saves it."""
    mask = torch.ones(7)
    return remat(lambda x: (x + mask).cos())(x).sum()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(y)
        ctx.more = torch.cat([x, x])
        return y + 1

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0]


def scoped(x):
    with checkpoint_scope():
        y = x.cos().sin()
    return (y * y).exp().sum()


def several_backwards(x):
    small = grad(lambda x: x[:2].exp().sum())(x)
    return grad(lambda x: (x.exp() * x.sin()).sum())(x) + small


def backward_by(way):
    def f(x):
        x = x.requires_grad_()
        way((x * x).exp().sum(), x)

    return f


def f_of_all_kinds(a, *rest, b, **more):
    return (a * rest[0] * rest[1]["k"] * b * more["c"]).sum()


ones = torch.ones(7)
exp_sin = lambda x: x.exp().sin()
ARG, EXP = (28, "argument x", None), (28, "output of aten.exp", "ExpBackward0")
# Bytes, where it comes from, and who keeps it (where that is more than the node of the operator).
KEPT = {
    # Forward over reverse keeps the tangents of what reverse keeps.
    "jvp(grad)": (
        lambda x: jvp(grad(lambda x: x.exp().sin().sum()), (x,), (x,)),
        [(28, "output of aten.exp", None), (28, "output of aten.mul", None)],
    ),
    "jacrev": (jacrev(exp_sin), [(28, "output of aten.exp", None)]),
    "torch.autograd.backward": (backward_by(lambda y, x: torch.autograd.backward(y)), [ARG, EXP]),
    "torch.autograd.grad": (backward_by(lambda y, x: torch.autograd.grad(outputs=y, inputs=x)), [ARG, EXP]),
    "Tensor.backward": (backward_by(lambda y, x: y.backward()), [ARG, EXP]),
    "several": (several_backwards, [(28, None, None)] * 3),
    "closure of remat": (
        remat(lambda x: (x * SCALE).sum()),
        [(28, "argument x", "remat(<lambda>)"), (28, "global 'SCALE'", "remat(<lambda>)")],
    ),
    "constant": (grad(with_constant), [ARG, (28, "output of aten.ones", None)]),
    "copies to compare with": (
        grad(lambda x: remat(torch.sin, determinism_check="values")(x).sum()),
        [(28, "argument x", None), (28, None, None)],
    ),
    "a custom function": (
        Own.apply,
        [(28, "output of aten.sin", "OwnBackward"), (56, "output of aten.cat", "OwnBackward")],
    ),
    "numbers": (lambda x: (x * 2.0).sum(), []),
    "small tensors": (lambda x: (x * TWO).sum(), [(4, "global 'TWO'", None)]),
    "a scope": (scoped, [(28, "argument x", None), (28, "output of aten.exp", "ExpBackward0")]),
    "a builtin": (torch.sin, [(28, "argument 0", "SinBackward0")]),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name):
    f, expected = KEPT[name]
    found = [(r.bytes, r.source.split(" at ")[0], r.kept_by) for r in saved_residuals(f, torch.ones(7))]
    # (None: any.)
    assert len(found) == len(expected), found
    assert [tuple(e if e is None else a for a, e in zip(*pair)) for pair in zip(found, expected)] == expected


def test_forward_mode_keeps_nothing():
    with torch.no_grad():  # else it is asked what its own backward needs
        assert saved_residuals(jacfwd(exp_sin), ones) == []


def test_names_of_arguments():
    found = saved_residuals(f_of_all_kinds, ones, ones + 1, {"k": ones + 2}, b=ones + 3, c=ones + 4)
    names = ["a", "rest[0]", "rest[1]['k']", "b", "more['c']"]
    assert [r.source for r in found if r.kind == "argument"] == [f"argument {name}" for name in names]


def test_regions_of_hooks(params):
    """The inner region's inputs are the outer one's to recompute; what a policy keeps is beside the graph."""
    inner = lambda params, x: checkpoint(block, params, x.sin()).cos()
    assert rows(lambda params, x: checkpoint(inner, params, x), params, torch.ones(N, D)) == [W1, W2, X]
    context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default])

    def f(params, x):
        return checkpoint(block, params, x, context_fn=context_fn).exp().sum()

    assert rows(f, params, torch.ones(N, D)) == [W1, W2, X, tanh(), exp(f)]


@pytest.mark.parametrize("wrap", [remat, no_remat])
@pytest.mark.parametrize("seed", seeds(30, 60))
def test_random_programs(seed, wrap):
    """To look breaks nothing, all that is kept is alive, and all of it has a source."""
    program, (x, w) = draw(seed), inputs(seed)
    expected = outcome(lambda: program.run(wrap, x, w), seed)
    with Meter() as meter:
        found = outcome(lambda: saved_residuals(lambda x, w: program.run(wrap, x, w), x, w), seed)
    assert type(found.error) is type(expected.error), found.error
    residuals = found.value or []
    assert sum(r.bytes for r in residuals if r.kind == "output") <= meter.peak_bytes
    # The parameters of a module of the database are in the cache of a function, where nothing has a name.
    if "module_of" not in program.source:
        assert not [r for r in residuals if r.source == "a captured tensor"]


def test_a_part_whose_graph_is_freed():
    def f(x):
        y = remat(torch.exp)(x * 1).sum()
        torch.autograd.grad(y, x)
        return y * x.sum()

    assert saved_residuals(f, torch.ones(3, requires_grad=True))


def test_random_streams_and_gradients_are_left_alone():
    x, own = torch.ones(10, requires_grad=True), torch.Generator()
    states = lambda: [
        *(torch.get_rng_state(), own.get_state()),
        *(torch.tensor([random.getstate()[1]]), torch.tensor(np.random.get_state()[1].astype(int))),
    ]

    def step(x):
        y = F.dropout(x) * torch.rand(10, generator=own) * random.random() * np.random.rand()
        return remat(torch.sin)(y).sum()

    before = states()
    for run in (saved_residuals, explain):
        assert run(step, x) and x.grad is None
    assert all(map(torch.equal, before, states()))


def test_printed(params, capsys):
    print_saved_residuals(vmap(grad(rematted), (None, 0)), params, torch.ones(B, N, D))
    assert capsys.readouterr().out == (
        "float32[4, 8]     128 bytes  argument params['w1']\n"
        "float32[8, 2]      64 bytes  argument params['w2']\n"
        "float32[5, 3, 4]  240 bytes  argument x\n"
        f"float32[5, 3, 2]  120 bytes  output of aten.exp at {line(rematted, 'exp()')}\n"
    )
    print_saved_residuals(lambda x: x + 1, torch.ones(3))
    assert capsys.readouterr().out == ""
    named = [r for r in saved_residuals(loss, params, torch.ones(N, D)) if r.name]
    assert [str(r) for r in named] == [
        f"float32[3, 8]  96 bytes  named 'square', output of aten.mul at {SQUARE}"
    ]
    with pytest.raises(InputError, match="a function and its arguments"):
        saved_residuals(torch.ones(3))
