"""torch.compile around transforms with remat inside: values, and whether the graph recomputes."""

import copy
import json
import random
from collections import Counter
from functools import partial
from itertools import accumulate

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from oracles import assert_same, plain as none, tensor
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention
from torch.nn.functional import dropout
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

import funcckpt
from funcckpt import checkpoint, checkpoint_name, checkpoint_scope, policies, remat
from funcckpt.meter import mark
from funcckpt.nn import Remat, apply_remat

DEPTH = 3
TANH = "aten.tanh.default"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def counted(f, seen=None):
    """f, compiled in one graph; and how often each operator stands in what is run, backward and all."""
    counts = Counter()

    def count(graph, _):
        counts.update(str(node.target) for node in graph.graph.nodes)
        if seen is not None:
            seen.append(graph.graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(f, backend=backend, fullgraph=True), counts


def block(p, x):
    return x + torch.tanh(x @ p["in"]).sin() @ p["out"]


def blocks(wrap):
    def loss(parameters, x):
        for p in parameters:
            x = wrap(block)(p, x)
        return (x * x).sum()

    return loss


loss, plain_loss = blocks(remat), blocks(none)
PARAMETERS = [{"in": tensor(3, 5, seed=i), "out": tensor(5, 3, seed=i)} for i in range(DEPTH)]
X = tensor(4, 3, seed=9)


tangents_of = lambda f: lambda p, x: jvp(lambda x: f(p, x), (x,), (x.cos(),))
sensitivity = lambda f: lambda p, x: grad(f, argnums=1)(p, x).pow(2).sum()


# Transforms, and how often each block is run: forward mode keeps nothing, and recomputes nothing.
TRANSFORMS = {
    "grad": (grad, 2),
    "vmap(grad)": (lambda f: vmap(grad(f), (None, 0)), 2),
    "jvp": (tangents_of, 1),
    "jvp(grad)": (lambda f: lambda p, x: jvp(lambda x: grad(f, argnums=1)(p, x), (x,), (x.cos(),)), 2),
    "grad(grad)": (lambda f: grad(sensitivity(f)), 4),
    "hessian": (lambda f: hessian(f, argnums=1), 2),
}  # vmap(hessian) is not compiled by any torch so far, with remat or without


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_recompute_in_one_graph(name):
    transform, times = TRANSFORMS[name]
    compiled, counts = counted(transform(loss))
    torch.testing.assert_close(compiled(PARAMETERS, X), transform(plain_loss)(PARAMETERS, X))
    assert counts[TANH] == times * DEPTH


def test_recomputation_waits_for_its_cotangent():
    """Or inductor recomputes all blocks first, as it likes to put matrix products before other operators."""
    compiled, _ = counted(grad(loss, argnums=1), graphs := [])
    compiled(PARAMETERS, X)
    above = {}  # what a node is computed from
    last = {}  # of the recomputed blocks that a node needs, the one that comes last in the backward
    seen = []
    for node in graphs[0].nodes:
        above[node] = {*node.all_input_nodes}.union(*[above[n] for n in node.all_input_nodes])
        last[node] = max([last[n] for n in node.all_input_nodes], default=-1)
        if str(node.target) == TANH and any("barrier" in str(n.target) for n in above[node]):
            seen.append(last[node])
            last[node] = len(seen) - 1
    assert seen == [-1, 0, 1][:DEPTH]


@pytest.mark.exhaustive
def test_the_default_compiler_saves_memory(tmp_path):
    p = [{"in": torch.randn(32, 256), "out": torch.randn(256, 32)}] * 6
    x = torch.randn(128, 32)

    def peak(loss):
        f = torch.compile(vmap(grad(loss, argnums=1), (None, 0)), fullgraph=True)
        f(p, x)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            f(p, x)
        profile.export_chrome_trace(str(tmp_path / "trace"))
        events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
        changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
        return max(accumulate(n for _, n in sorted(changes, key=lambda c: c[0])))

    assert 0 < peak(loss) <= 0.6 * peak(plain_loss)


def gradients(f, *own):
    """Of the sum of all that f returns, by plain autograd, with respect to all that it is given, and `own`."""
    arguments = pytree.tree_map(lambda x: x.clone().requires_grad_(), (PARAMETERS, X))
    y = sum(y.sum() for y in pytree.tree_leaves(f(*arguments)))
    return torch.autograd.grad(y, [*pytree.tree_leaves(arguments), *own], allow_unused=True)


# How often each block is run in forward and backward together.
LOSSES = {
    "plain": (none, 2),
    "vmap": (lambda f: lambda p, x: vmap(f, (None, 0))(p, x).sum(), 2),
    "vmap(grad)": (lambda f: lambda p, x: vmap(sensitivity(f), (None, 0))(p, x).sum(), 4),
    "jvp": (lambda f: lambda p, x: tangents_of(f)(p, x)[1], 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_training_steps_recompute(name):
    transform, times = LOSSES[name]
    compiled, counts = counted(transform(loss))
    torch.testing.assert_close(gradients(compiled), gradients(transform(plain_loss)))
    assert counts[TANH] == times * DEPTH


def test_without_gradients_nothing_is_recomputed():
    compiled, counts = counted(loss)
    with torch.no_grad():
        for x in (X, X.clone().requires_grad_()):
            torch.testing.assert_close(compiled(PARAMETERS, x), plain_loss(PARAMETERS, X))
    assert compiled(PARAMETERS, X) == plain_loss(PARAMETERS, X) and counts[TANH] == 3 * DEPTH


def captured(wrap):
    def loss(p, x):
        for q in p:
            x = wrap(lambda x, q=q: block(q, x))(x)
            x = wrap(lambda: block(q, x))()  # noqa: B023
        return (x * x).sum()

    return loss


@remat(static_argnums=2, static_argnames="scale")
def decorated(p, x, act, *, scale):
    y = getattr(torch, act)(x @ p["in"]) @ p["out"]
    return {"y": (y * scale,), "n": 3, "same": x}, None


made_outside = remat(block)


def of_any_structure(wrap):
    def loss(p, x):
        for q in p:
            out, nothing = (decorated.__wrapped__ if wrap is none else decorated)(q, x, "tanh", scale=2)
            assert nothing is None
            x = (block if wrap is none else made_outside)(q, out["y"][0] * out["n"] + out["same"])
        return (x * x).sum()

    return loss


MODULE = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def kinds_of_callables(wrap):
    def loss(p, x):
        for f in (MODULE, MODULE.forward, partial(block, p[0]), torch.tanh):
            x = wrap(f)(x)
        return (x * x).sum()

    return loss


nested = lambda wrap: wrap(blocks(wrap))
around_vmap = lambda wrap: blocks(lambda f: wrap(vmap(f, (None, 0))))


# And how often blocks are run, in a training step and under `grad`.
PROGRAMS = {
    captured: (4 * DEPTH, 4 * DEPTH),
    of_any_structure: (4 * DEPTH, 4 * DEPTH),
    kinds_of_callables: (8, 8),
    nested: (2 * DEPTH, 3 * DEPTH),
    around_vmap: (2 * DEPTH, 2 * DEPTH),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program):
    own = [*MODULE.parameters()] if program is kinds_of_callables else []
    compiled, counts = counted(program(remat))
    torch.testing.assert_close(gradients(compiled, *own), gradients(program(none), *own))
    assert counts[TANH] == PROGRAMS[program][0]
    compiled, counts = counted(grad(program(remat), argnums=1))
    torch.testing.assert_close(compiled(PARAMETERS, X), grad(program(none), argnums=1)(PARAMETERS, X))
    assert counts[TANH] == PROGRAMS[program][1]


def test_modules():
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(DEPTH)]
    plain, ours = [copy.deepcopy(nn.Sequential(*layers).double()) for _ in range(2)]
    apply_remat(ours, "?")
    ours[1] = layers[1]
    ours[1].forward = partial(funcckpt.checkpoint, ours[1].forward)

    def of(m, compiler):
        per_sample = vmap(grad(lambda p, x: functional_call(m, p, (x,)).square().sum()), (None, 0))
        found = compiler(per_sample)(dict(m.named_parameters()), X)
        y = compiler(lambda x: m(x).square().sum())(X)
        return [*found.values()], torch.autograd.grad(y, list(m.parameters()))

    all_counts = []

    def compiler(f):
        f, counts = counted(f)
        all_counts.append(counts)
        return f

    torch.testing.assert_close(of(ours, compiler), of(plain, none))
    assert [counts[TANH] for counts in all_counts] == [2 * DEPTH, 2 * DEPTH]


def test_decorated_methods():
    def net(wrap):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(tensor(3, 3))

            @wrap
            def block(self, x):
                return torch.tanh(x @ self.weight).sin()

            def forward(self, x):
                return self.block(self.block(x)).sum()

        return Net()

    ours, plain = net(remat), net(none)
    compiled, counts = counted(ours)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(X), ours.weight), torch.autograd.grad(plain(X), plain.weight)
    )
    assert counts[TANH] == 4


def masks(x):
    # Random operators that write, and whose results are written to.
    y = torch.rand_like(x).mul_(2) * torch.empty_like(x).bernoulli_(0.5).sub_(0.25)
    return dropout(x * y, 0.5) * torch.empty_like(x).uniform_(1, 2)


with_value = lambda f: grad(lambda x: (lambda y: (y.sum(), y))(remat(f)(x)), has_aux=True)


@pytest.mark.parametrize("f", [lambda x: dropout(x, 0.5), masks], ids=["dropout", "masks"])
@pytest.mark.parametrize("randomness", [None, "different", "same"])
def test_random_numbers_are_those_of_the_forward(f, randomness):
    x = torch.rand(5, 32, dtype=torch.float64) + 0.5
    run = with_value(f)
    compiled, _ = counted(run if randomness is None else vmap(run, randomness=randomness))
    g, y = compiled(x)
    torch.testing.assert_close(g * x, y)
    assert 0 < (y == 0).sum() < y.numel()
    assert len((y == 0).unique(dim=0)) == (1 if randomness == "same" else 5)


def test_random_numbers_of_training_steps():
    """Between plain autograd and a transform."""
    w, x = [torch.rand(64, dtype=torch.float64) + 0.5 for _ in range(2)]

    def f(w, x):
        g, y = with_value(lambda x: dropout(w * x, 0.5))(x)
        return g.square().sum(), y

    compiled, _ = counted(f)
    value, y = compiled(w.requires_grad_(), x)
    torch.testing.assert_close(torch.autograd.grad(value, w)[0], 2 * w.detach() * (y / (w * x)).detach() ** 2)


CONTEXTS = partial(funcckpt.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])


def write(x):
    return x.mul_(2).sin()


@pytest.mark.parametrize(
    ("f", "says"),
    [
        (lambda x: remat(torch.sin, policy=funcckpt.policies.dots_saveable)(x).sum(), "policy cannot be"),
        (
            grad(lambda x: funcckpt.checkpoint(torch.sin, x, context_fn=CONTEXTS).sum()),
            "context_fn cannot be",
        ),
        (
            grad(lambda x: remat(write)(x * 1).sum()),
            "remat(write) writes in place to a tensor (float64[4, 3]) or what it captured",
        ),
    ],
    ids=["policy", "contexts", "write"],
)
def test_what_is_refused(f, says):
    with pytest.raises(Exception) as caught:
        torch.compile(f, backend="aot_eager", fullgraph=True)(X)
    checkpoint_of_torch(torch.sin, X.clone().requires_grad_(), use_reentrant=False)  # hooks are allowed
    assert says in f"{caught.value.__context__} {caught.value}"  # in whatever the compiler wraps it


# Dynamo tries to compile the backward as well, and warns of what it does not know there.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", [grad, none])
def test_a_broken_graph_is_checkpointed_all_the_same(transform):
    def broken(p, x):
        torch._dynamo.graph_break()
        return block(p, x)

    compiled = torch.compile(transform(blocks(lambda f: remat(broken))), backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(transform(plain_loss)))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.seen = nn.Linear(3, 3), nn.BatchNorm1d(3), 0

    def forward(self, x):
        self.seen += len(x)
        torch._dynamo.graph_break()
        return self.norm(self.linear(x) * (2 if self.training else 1)).tanh() * random.random()


class Stores(nn.Module):
    """Its loss is part of what the caller differentiates, as that of a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.linear, self.losses = nn.Linear(3, 3), []

    def forward(self, x):
        h = self.linear(x).tanh()
        self.losses.append(h.exp().sum())
        return h


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [Counts, Stores, lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))])
def test_the_contract_holds_where_dynamo_does_not_trace(make):
    def run(wrap, compiled):
        torch.manual_seed(0)
        random.seed(0)
        module = make()
        loss = compiled(wrap(module))(torch.randn(4, 3)).square().sum()
        loss = loss + sum(getattr(module, "losses", []))
        module.eval()
        gradients = torch.autograd.grad(loss, [*module.parameters()])
        return gradients, vars(module).get("seen"), module.state_dict(), random.random()

    assert_same(run(Remat, partial(torch.compile, backend="eager")), run(none, none))


@pytest.mark.parametrize("name", ["vmap(grad)", "jvp", "hessian"])
def test_the_eager_backend_recomputes(name):
    """It runs the graph of Dynamo itself, with no AOTAutograd: as it is without a compiler."""
    eager, counts = TRANSFORMS[name][0](loss), []
    compiled = torch.compile(eager, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(PARAMETERS, X), TRANSFORMS[name][0](plain_loss)(PARAMETERS, X))
    for f in (compiled, eager):
        with torch.profiler.profile(acc_events=True) as profile:
            f(PARAMETERS, X)
        counts.append(sum(event.name == "aten::tanh" for event in profile.events()))
    assert counts[0] == counts[1] > 0


def test_the_recomputation_casts_as_the_forward():
    """Autocast is on around the call alone, not in the backward."""

    def loss(wrap):
        def f(p, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = wrap(lambda p, x: torch.tanh(x @ p) @ p.mT)(p, x)
            return y.float().square().sum()

        return f

    p, x = tensor(3, 3).float(), X.float()
    run = lambda wrap: grad(loss(wrap))(p, x)
    torch.testing.assert_close(
        torch.compile(run, fullgraph=True, backend="aot_eager")(remat), run(none), rtol=0, atol=0
    )


def test_names_and_marks_break_no_graph():
    def loss(x):
        y = remat(lambda x: checkpoint_name(x.sin(), "sine").exp())(x)
        mark("saved")
        return y.sum()

    run = vmap(grad(loss))
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(X), run(X))


class Part(nn.Module):
    """Statistics, a flag and an attribute: each may change between the forward and the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.scale = nn.Linear(3, 3), nn.BatchNorm1d(3), 2.0

    def forward(self, x):
        return x + self.norm(torch.tanh(self.first(x))) * self.scale


def two_steps(model):
    gradients = []
    for _ in range(2):
        gradients.append(torch.autograd.grad(model(X).pow(2).sum(), [*model.parameters()]))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients[-1], strict=True):
                p -= 0.1 * g
    return gradients


def changed_before_the_backward(model):
    loss = model(X).pow(2).sum()
    model.eval()
    for part in model.modules():
        if isinstance(part, Part):
            part.scale = 3.0
    return torch.autograd.grad(loss, [*model.parameters()])


def doubled(model):
    return [2 * p.detach() for p in model.parameters()]


def of_other_parameters(model, parameters):
    names = dict(zip(dict(model.named_parameters()), parameters, strict=True))
    return functional_call(model, names, (X,)).pow(2).sum()


def plain_functional_call(model):
    parameters = [p.requires_grad_() for p in doubled(model)]
    return torch.autograd.grad(of_other_parameters(model, parameters), parameters)


def grad_of_functional_call(model):
    return grad(lambda parameters: of_other_parameters(model.eval(), parameters))(doubled(model))


def compiled_in_place(module):
    module.compile(backend="aot_eager")
    return module


def compiled_forward(module):
    module.forward = torch.compile(module.forward, backend="aot_eager")
    return module


COMPILED = {
    "module": partial(torch.compile, backend="aot_eager"),
    "in place": compiled_in_place,
    "forward": compiled_forward,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("which", ["block", "norm"])
@pytest.mark.parametrize("wrap", [remat, lambda f: partial(checkpoint, f)], ids=["remat", "checkpoint"])
@pytest.mark.parametrize(
    "program",
    [two_steps, changed_before_the_backward, plain_functional_call, grad_of_functional_call],
    ids=lambda program: program.__name__,
)
def test_compiled_modules_inside_of_a_checkpoint(program, wrap, which, how):
    """What is rebuilt for a run is compiled as the original is, by the same code."""

    class Model(nn.Module):
        def __init__(self, wrap, compiled):
            super().__init__()
            torch.manual_seed(0)
            part = Part().double()
            if which == "norm":
                part.norm = compiled(part.norm)
            self.block, self.wrap = compiled(part) if which == "block" else part, wrap

        def forward(self, x):
            return self.wrap(self.block)(x)

    plain, model = Model(none, none), Model(wrap, COMPILED[how])
    assert_same(program(model), program(plain))
    assert_same([*model.buffers()], [*plain.buffers()])
    program(model)  # which may be in eval mode by now
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    program(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize("wrap", [remat, lambda f: partial(checkpoint, f)], ids=["remat", "checkpoint"])
def test_a_backward_inside_of_a_compiled_function(wrap):
    """It breaks the graph, and Dynamo then watches what autograd calls."""

    def run(wrap, compiled):
        torch.manual_seed(0)
        parts = nn.ModuleList([Part(), Part()]).double()
        optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)

        @compiled
        def update(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for _ in range(2):
            y = X
            for part in parts:
                y = wrap(part)(y)
            update(y.square().sum())
        return parts.state_dict()

    assert_same(run(wrap, partial(torch.compile, backend="aot_eager")), run(none, none))


SCALE = 1.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize("wrap", [remat, lambda f: partial(checkpoint, f)], ids=["remat", "checkpoint"])
def test_compiled_code_after_a_recomputation_with_other_globals(wrap, monkeypatch):
    """Dynamo keeps the code for all functions that share it, and puts what it calls into globals."""
    f = torch.compile(lambda x: x.sin() * SCALE, backend="aot_eager")
    for scale in (1.0, 2.0, 3.0):
        x = X.clone().requires_grad_()
        monkeypatch.setitem(globals(), "SCALE", scale)
        y = wrap(f)(x)
        monkeypatch.setitem(globals(), "SCALE", scale + 1)
        y.sum().backward()
        assert_same(x.grad, X.cos() * scale)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize("wrap", [remat, lambda f: partial(checkpoint, f)], ids=["remat", "checkpoint"])
def test_what_is_put_on_something_compiled(wrap):
    """Attributes of a compiled function, which f reads and writes; hooks and forward of a compiled module."""

    def run(wrap, compiled):
        x = X.clone().requires_grad_()
        t, part = x.exp(), Part().double().eval()
        f, module = compiled(lambda x: x.sin() * t), compiled(part)
        f.scale, f.calls, f.tensor = 2.0, 0, x * 3
        module.register_forward_hook(lambda module, args, out: out * t)
        forward = module.forward
        module.forward = lambda x: forward(x) + t

        def g(x):
            f.calls = f.calls + 1
            return module(f(x) * f.scale * f.tensor) * f.calls

        y = wrap(g)(x)
        f.scale = part.scale = 5.0
        return torch.autograd.grad(y.sum(), x), f.calls

    torch.manual_seed(0)
    compiled = run(wrap, partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    assert_same(compiled, run(none, lambda f: f))


@pytest.mark.parametrize("wrap", [remat, lambda f: partial(checkpoint, f)], ids=["remat", "checkpoint"])
def test_forward_over_reverse_is_traced_with_symbolic_sizes(wrap):
    """Torch asks for sizes by operators that its dispatcher does not know."""
    w, block = tensor(3, 3), lambda w, x: torch.tanh(x @ w)
    second = lambda f: hessian(lambda w, x: f(w, x).square().sum())
    traced = make_fx(second(wrap(block)), tracing_mode="symbolic")(w, X)
    assert_same(traced(w, X), second(block)(w, X))


@pytest.mark.parametrize("how", ["grad", "vmap(grad)"])
def test_checkpoint_in_a_function_that_dynamo_does_not_look_into(how):
    block = lambda w, x: (x @ w).tanh() @ w
    f = torch.compiler.allow_in_graph(lambda w, x: checkpoint(block, w, x).square().sum())
    run = grad(f) if how == "grad" else vmap(grad(f), (None, 0))
    expected = (grad if how == "grad" else lambda f: vmap(grad(f), (None, 0)))(
        lambda w, x: block(w, x).square().sum()
    )
    w = tensor(3, 3)
    assert_same(torch.compile(run, backend="aot_eager", fullgraph=True)(w, X), expected(w, X))


def counting(counts):
    """A backend whose graphs count their runs."""

    def backend(graph, inputs):
        def run(*args):
            counts["runs"] += 1
            return graph(*args)

        return run

    return backend


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "policy", [policies.dots_saveable, policies.budget(fraction=0.5)], ids=["dots", "budget"]
)
def test_a_policy_around_something_compiled(policy, fullgraph):
    counts = Counter()
    inner = torch.compile(lambda w, x: torch.tanh(x @ w).sin(), backend=counting(counts), fullgraph=fullgraph)
    f = lambda w, x: (inner(w, x.cos()) @ w).exp() @ w
    w, x = tensor(3, 3).requires_grad_(), X
    (expected,) = torch.autograd.grad(f(w, x).sum(), w)
    counts.clear()
    for i in range(1, 4):
        y = remat(f, policy=policy)(w, x).sum()
        assert_same(torch.autograd.grad(y, w)[0], expected)
        assert counts["runs"] == 2 * i  # in the forward and the recomputation
    inner(w, x)
    assert counts["runs"] == 7


def scoped(f):
    def run(*args):
        with checkpoint_scope():
            return f(*args)

    return run


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize(
    "wrap",
    [
        partial(remat, policy=policies.dots_saveable),
        partial(remat, policy=policies.everything_saveable),
        scoped,
    ],
    ids=["dots", "everything", "scope"],
)
def test_fused_kernels_write_where_no_mode_sees_it(wrap):
    """They reuse the memory of a convolution, which a policy would keep."""
    convolve = lambda w, x: torch.nn.functional.conv2d(x, w, padding=1)
    layers = torch.compile(lambda w, x: convolve(w, convolve(w, x).exp()).exp())
    f = lambda w, x: convolve(w, layers(w, convolve(w, x).sin())).square()
    w, x = (0.1 * tensor(3, 3, 3, 3)).requires_grad_(), tensor(2, 3, 8, 8)
    expected = torch.autograd.grad(f(w, x).sum(), w)
    for _ in range(2):
        assert_same(torch.autograd.grad(wrap(f)(w, x).sum(), w), expected)


def test_a_compiled_block_after_a_reset():
    """Torch then does not say that anything was compiled."""
    counts = Counter()
    inner = torch.compile(lambda w, x: torch.tanh(x @ w).sin(), backend=counting(counts))
    w, x = tensor(64, 64).requires_grad_(), tensor(256, 64)
    step = lambda: remat(lambda w, x: inner(w, x.cos()))(w, x).sum().backward()
    step()
    torch._dynamo.reset()
    for _ in range(3):
        counts.clear()
        step()
        assert counts["runs"] == 2


def test_a_recomputation_leaves_the_levels_of_a_compiled_function():
    f = lambda w, x: jvp(lambda x: (x @ w).tanh(), (x,), (x,))[1]
    w = tensor(3, 3).requires_grad_()
    step = torch.compile(lambda w, x: checkpoint(f, w, x), backend="eager")
    assert_same(torch.autograd.grad(step(w, X).sum(), w), torch.autograd.grad(f(w, X).sum(), w))
    assert_same(jvp(torch.sin, (X,), (X,))[1], X.cos() * X)


@pytest.mark.filterwarnings("ignore")
def test_flex_attention(monkeypatch):
    """Torch refuses its backward on a CPU, by a check alone."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    score = lambda score, b, h, i, j: score + (i - j)
    f = lambda q: flex_attention.flex_attention((q @ q.mT @ q).sin(), q, q, score_mod=score).tanh()
    q = torch.randn(1, 2, 16, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(f(q).sum(), q)
    for op in (torch.ops.aten.bmm.default, torch.ops.higher_order.flex_attention):
        contexts = partial(funcckpt.create_selective_checkpoint_contexts, [op])
        y = checkpoint(f, q, context_fn=contexts)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), q)[0], expected)


def test_a_policy_that_keeps_nothing_is_none_in_compiled_code():
    f = lambda x: remat(torch.sin, policy=funcckpt.policies.nothing_saveable)(x).sum()
    torch.testing.assert_close(torch.compile(grad(f), backend="aot_eager", fullgraph=True)(X), X.cos())
