"""torch.compile around transforms with remat inside: values, and whether the graph recomputes."""

import copy
import json
from collections import Counter
from functools import partial
from itertools import accumulate

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import funcckpt
from funcckpt import checkpoint_name, remat
from funcckpt.meter import mark
from funcckpt.nn import apply_remat

DEPTH = 3


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tensor(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def counted(f, **options):
    """f, compiled in one graph; and how often each operator stands in what is run, backward and all."""
    counts = Counter()

    def count(graph, _):
        counts.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(f, backend=backend, fullgraph=True, **options), counts


def block(p, x):
    return x + torch.tanh(x @ p["in"]).sin() @ p["out"]


def loss(parameters, x, wrap=remat):
    for p in parameters:
        x = wrap(block)(p, x)
    return (x * x).sum()


def plain_loss(parameters, x):
    return loss(parameters, x, wrap=lambda f: f)


PARAMETERS = [{"in": tensor(3, 5), "out": tensor(5, 3)} for _ in range(DEPTH)]
X = tensor(4, 3)


def tangents_of(f):
    return lambda p, x: jvp(lambda x: f(p, x), (x,), (x.cos(),))


def second(f):
    return lambda p, x: jvp(lambda x: grad(f, argnums=1)(p, x), (x,), (x.cos(),))


def penalty(f):
    return lambda p, x: grad(lambda p, x: grad(f, argnums=1)(p, x).pow(2).sum())(p, x)


# Transforms, and how often each block is run: forward mode keeps nothing, and recomputes nothing.
TRANSFORMS = {
    "grad": (grad, 2),
    "grad_and_value": (grad_and_value, 2),
    "vmap(grad)": (lambda f: vmap(grad(f), (None, 0)), 2),
    "grad(vmap)": (lambda f: grad(lambda p, x: vmap(f, (None, 0))(p, x).sum()), 2),
    "vjp": (lambda f: lambda p, x: vjp(f, p, x)[1](torch.ones((), dtype=x.dtype)), 2),
    "jvp": (tangents_of, 1),
    "jvp(grad)": (second, 2),
    "grad(grad)": (penalty, 4),
    "jacrev": (lambda f: jacrev(f, argnums=1), 2),
    "jacfwd": (lambda f: jacfwd(f, argnums=1), 1),
    "hessian": (lambda f: hessian(f, argnums=1), 2),
}  # vmap(hessian) is not compiled by any torch so far, with remat or without


LIKE_OTHERS = ("grad_and_value", "vjp", "grad(vmap)", "jacfwd")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive if n in LIKE_OTHERS else ()) for n in TRANSFORMS],
)
def test_transforms_recompute_in_one_graph(name):
    transform, times = TRANSFORMS[name]
    compiled, counts = counted(transform(loss))
    torch.testing.assert_close(compiled(PARAMETERS, X), transform(plain_loss)(PARAMETERS, X))
    assert counts["aten.tanh.default"] == times * DEPTH


def test_recomputation_waits_for_its_cotangent():
    """Or inductor recomputes all blocks first, as it likes to put matrix products before other operators."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    torch.compile(grad(loss, argnums=1), backend=aot_autograd(fw_compiler=keep), fullgraph=True)(
        PARAMETERS, X
    )
    last = {}  # of the recomputed blocks that a node needs, the one that comes last in the backward
    seen = []
    for node in graphs[0].nodes:
        needs = [last.get(n, -1) for n in node.all_input_nodes]
        last[node] = max(needs, default=-1)
        if str(node.target) == "aten.tanh.default" and any(
            "barrier" in str(n.target) for n in ancestors(node)
        ):
            seen.append(last[node])
            last[node] = len(seen) - 1
    assert seen == [-1, 0, 1][:DEPTH]


def ancestors(node):
    found, pending = set(), [node]
    while pending:
        for n in pending.pop().all_input_nodes:
            if n not in found:
                found.add(n)
                pending.append(n)
    return found


def training_step(f):
    def step(p, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(p, x), x)

    return step


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("inside", "outside", "share"),
    [
        (partial(grad, argnums=1), lambda f: f, 0.6),
        (lambda f: vmap(grad(f, argnums=1), (None, 0)), lambda f: f, 0.6),
        (lambda f: f, training_step, 0.6),
        (tangents_of, lambda f: f, 1),  # forward mode keeps nothing
    ],
    ids=["grad", "vmap(grad)", "training step", "jvp"],
)
def test_the_default_compiler_saves_memory(inside, outside, share, tmp_path):
    p = {"in": torch.randn(32, 256), "out": torch.randn(256, 32)}
    x = torch.randn(128, 32)

    def peak(loss):
        step = outside(torch.compile(inside(loss), fullgraph=True))
        step([p] * 6, x)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            step([p] * 6, x)
        profile.export_chrome_trace(str(tmp_path / "trace"))
        events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
        changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
        return max(accumulate(n for _, n in sorted(changes, key=lambda c: c[0])))

    assert 0 < peak(loss) <= share * peak(plain_loss)


# -- plain autograd around it -----------------------------------------------------------------------------


def leaves():
    return pytree.tree_map(lambda x: x.clone().requires_grad_(), (PARAMETERS, X))


def gradients(f):
    """Of a scalar of f, by plain autograd."""
    parameters, x = leaves()
    y = sum(y.sum() for y in pytree.tree_leaves(f(parameters, x)))
    return torch.autograd.grad(y, pytree.tree_leaves((parameters, x)))


def sensitivity(f):
    return lambda p, x: grad(f, argnums=1)(p, x).pow(2).sum()


# How often each block is run in forward and backward together.
LOSSES = {
    "plain": (lambda f: f, 2),
    "vmap": (lambda f: lambda p, x: vmap(f, (None, 0))(p, x).sum(), 2),
    "grad": (sensitivity, 4),
    "vmap(grad)": (lambda f: lambda p, x: vmap(sensitivity(f), (None, 0))(p, x).sum(), 4),
    "jvp": (lambda f: lambda p, x: tangents_of(f)(p, x)[1], 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_training_steps_recompute(name):
    transform, times = LOSSES[name]
    compiled, counts = counted(transform(loss))
    torch.testing.assert_close(gradients(compiled), gradients(transform(plain_loss)))
    assert counts["aten.tanh.default"] == times * DEPTH


def test_without_gradients_nothing_is_recomputed():
    compiled, counts = counted(loss)
    torch.testing.assert_close(compiled(PARAMETERS, X), plain_loss(PARAMETERS, X))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves()), plain_loss(PARAMETERS, X))
    assert counts["aten.tanh.default"] == 2 * DEPTH


# -- what f is ----------------------------------------------------------------------------------------------


def captured_loss(p, x):
    for q in p:
        x = remat(lambda x, q=q: block(q, x))(x)
        x = remat(lambda: block(q, x))()  # noqa: B023
    return (x * x).sum()


def plain_captured_loss(p, x):
    for q in p:
        x = block(q, block(q, x))
    return (x * x).sum()


@pytest.mark.parametrize("name", ["grad", "vmap(grad)", "jvp(grad)"])
def test_captured_tensors_are_inputs(name):
    transform, times = TRANSFORMS[name]
    compiled, counts = counted(transform(captured_loss))
    torch.testing.assert_close(compiled(PARAMETERS, X), transform(plain_captured_loss)(PARAMETERS, X))
    assert counts["aten.tanh.default"] == 2 * times * DEPTH


def test_captured_tensors_of_training_steps():
    compiled, counts = counted(captured_loss)
    torch.testing.assert_close(gradients(compiled), gradients(plain_captured_loss))
    assert counts["aten.tanh.default"] == 4 * DEPTH


made_outside = remat(block)


@remat(static_argnums=2, static_argnames="scale")
def decorated(p, x, act, *, scale):
    y = getattr(torch, act)(x @ p["in"]) @ p["out"]
    return {"y": (y * scale,), "n": 3, "same": x}, None


def test_made_outside_and_any_structure():
    def f(wrap):
        def loss(p, x):
            for q in p:
                out, nothing = (decorated if wrap else decorated.__wrapped__)(q, x, "tanh", scale=2)
                assert nothing is None
                x = (made_outside if wrap else block)(q, out["y"][0] * out["n"] + out["same"])
            return (x * x).sum()

        return loss

    compiled, counts = counted(grad(f(True)))
    torch.testing.assert_close(compiled(PARAMETERS, X), grad(f(False))(PARAMETERS, X))
    assert counts["aten.tanh.default"] == 4 * DEPTH
    compiled, counts = counted(f(True))
    torch.testing.assert_close(gradients(compiled), gradients(f(False)))
    assert counts["aten.tanh.default"] == 4 * DEPTH


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(tensor(3, 3))

    def method(self, x):
        return torch.tanh(x @ self.w).sin()

    forward = method


def of_kinds(x, wrap, module):
    for f in (module, module.method, partial(block, PARAMETERS[0]), torch.tanh):
        x = wrap(f)(x)
    return x.sum()


@pytest.mark.parametrize("transform", [grad, lambda f: f])
def test_kinds_of_callables(transform):
    module = Module()
    compiled, counts = counted(transform(lambda x: of_kinds(x, remat, module)))
    x = X.clone().requires_grad_()
    wrt = [x, module.w]

    def derivative(f):
        return torch.autograd.grad(f(x).sum(), wrt)

    expected = derivative(transform(lambda x: of_kinds(x, lambda f: f, module)))
    torch.testing.assert_close(derivative(compiled), expected)
    # The result of the tanh that is the last block is an input of nothing but its own backward.
    assert counts["aten.tanh.default"] >= (7 if transform is not grad else 14)


def test_nested():
    def f(wrap):
        return lambda p, x: wrap(lambda p, x: loss(p, x, wrap))(p, x)

    compiled, counts = counted(grad(f(remat)))
    torch.testing.assert_close(compiled(PARAMETERS, X), grad(plain_loss)(PARAMETERS, X))
    assert counts["aten.tanh.default"] == 3 * DEPTH


def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(DEPTH)])


@pytest.mark.parametrize("how", ["Remat", "remat", "checkpoint"])
def test_modules(how):
    class Wrapped(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = remat(layer)(x) if how == "remat" else funcckpt.checkpoint(layer, x)
            return x

    plain = model().double()
    wrapped = copy.deepcopy(plain)
    if how == "Remat":
        apply_remat(wrapped, "?")
    else:
        wrapped = Wrapped(wrapped)

    def gradients_of(m, p, compiler):
        step = vmap(grad(lambda p, x: functional_call(m, p, (x,)).square().sum()), (None, 0))
        return pytree.tree_leaves(compiler(step)(p, X))

    expected = gradients_of(plain, dict(plain.named_parameters()), lambda f: f)
    seen = []

    def compiler(f):
        f, counts = counted(f)
        seen.append(counts)
        return f

    got = gradients_of(wrapped, dict(wrapped.named_parameters()), compiler)
    torch.testing.assert_close(got, expected)
    assert seen[0]["aten.tanh.default"] == 2 * DEPTH

    compiled, counts = counted(lambda x: wrapped(x).square().sum())
    got = torch.autograd.grad(compiled(X), list(wrapped.parameters()))
    torch.testing.assert_close(got, torch.autograd.grad(plain(X).square().sum(), list(plain.parameters())))
    assert counts["aten.tanh.default"] == 2 * DEPTH


# -- random numbers --------------------------------------------------------------------------------------


def mask(x):
    return torch.nn.functional.dropout(x, 0.5)


def masks(x):
    # Random operators that write, and whose results are written to.
    y = torch.rand_like(x).mul_(2) * torch.empty_like(x).bernoulli_(0.5).sub_(0.25)
    return mask(x * y) * torch.empty_like(x).uniform_(1, 2)


def with_value(f):
    return grad(lambda x: (lambda y: (y.sum(), y))(remat(f)(x)), has_aux=True)


UNDER = {
    "grad": with_value,
    "vmap": lambda f: vmap(with_value(f), randomness="different"),
    "vmap same": lambda f: vmap(with_value(f), randomness="same"),
}


@pytest.mark.parametrize("f", [mask, masks])
@pytest.mark.parametrize("under", ["grad", "vmap", "vmap same"])
def test_random_numbers_are_those_of_the_forward(f, under):
    x = torch.rand(5, 32, dtype=torch.float64) + 0.5
    compiled, _ = counted(UNDER[under](f))
    g, y = compiled(x)
    torch.testing.assert_close(g * x, y)
    assert 0 < (y == 0).sum() < y.numel()
    assert len((y == 0).unique(dim=0)) == (1 if under == "vmap same" else 5)


def test_random_numbers_of_training_steps():
    x = (torch.rand(64, dtype=torch.float64) + 0.5).requires_grad_()
    compiled, _ = counted(lambda x: remat(masks)(x).sum())
    y = compiled(x)
    torch.testing.assert_close((torch.autograd.grad(y, x)[0] * x).sum(), y)


def test_random_numbers_between_plain_autograd_and_a_transform():
    def f(w, x):
        g, y = grad(lambda x: (lambda y: (y.sum(), y))(remat(lambda x: mask(w * x))(x)), has_aux=True)(x)
        return g.square().sum(), y

    w = (torch.rand(64, dtype=torch.float64) + 0.5).requires_grad_()
    x = torch.rand(64, dtype=torch.float64) + 0.5
    compiled, _ = counted(f)
    value, y = compiled(w, x)
    drawn = (y / (w * x)).detach()
    torch.testing.assert_close(torch.autograd.grad(value, w)[0], 2 * w.detach() * drawn**2)


# -- what is refused -----------------------------------------------------------------------------------------


def message_of(f, *args):
    """What is said, in whatever the compiler wraps it."""
    try:
        torch.compile(f, backend="aot_eager", fullgraph=True)(*args)
    except Exception as error:
        # Left behind by torch where something is raised under a transform that it compiles.
        torch._C._autograd._saved_tensors_hooks_enable()
        return f"{error.__context__} {error}"
    return "nothing"


SINE = partial(funcckpt.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (lambda x: remat(torch.sin, policy=funcckpt.policies.dots_saveable)(x).sum(), "policy"),
        (grad(lambda x: funcckpt.checkpoint(torch.sin, x, context_fn=SINE).sum()), "context_fn"),
        (
            lambda x: funcckpt.checkpoint(torch.sin, x, policy=[torch.ops.aten.sin.default]).sum(),
            "checkpoint: policy",
        ),
    ],
    ids=["policy", "contexts", "policy of checkpoint"],
)
def test_what_is_refused(f, says):
    assert f"{says} cannot be honoured" in message_of(f, X)


def test_writes_to_inputs_are_refused_under_transforms():
    def write(x):
        return x.mul_(2).sin()

    said = message_of(grad(lambda x: remat(write)(x * 1).sum()), X)
    assert "remat(write) writes in place" in said
    assert "float64[4, 3]" in said


# -- what the compiler does not take -----------------------------------------------------------------------


# Dynamo tries to compile the backward as well, and warns of what it does not know there.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", [grad, lambda f: f])
def test_a_broken_graph_is_checkpointed_all_the_same(transform):
    def broken(p, x):
        torch._dynamo.graph_break()
        return block(p, x)

    def broken_loss(p, x):
        return loss(p, x, wrap=lambda f: remat(broken))

    compiled = torch.compile(transform(broken_loss), backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(transform(plain_loss)))


class Count(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls):
        return True


@pytest.mark.parametrize("name", ["grad", "vmap(grad)", "jvp", "hessian"])
def test_the_eager_backend_recomputes(name):
    """It runs the graph of Dynamo itself, with no AOTAutograd: as it is without a compiler."""
    transform, times = TRANSFORMS[name]
    compiled = torch.compile(transform(loss), backend="eager", fullgraph=True)
    compiled(PARAMETERS, X)
    with Count() as count:
        torch.testing.assert_close(compiled(PARAMETERS, X), transform(plain_loss)(PARAMETERS, X))
    assert count.seen == (times + 1) * DEPTH  # and once without remat


def test_names_and_marks_break_no_graph():
    def loss(x):
        y = remat(lambda x: checkpoint_name(x.sin(), "sine").exp())(x)
        mark("saved")
        return y.sum()

    x = torch.ones(3, 2, dtype=torch.float64)
    run = vmap(grad(loss))
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(x), run(x))
