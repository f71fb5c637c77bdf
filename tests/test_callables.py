"""Modules as what f is, refers to or is given: their parameters, hooks and parametrizations."""

import copy
import functools
import types

import pytest
import torch
from oracles import F64, OBSERVATIONS, assert_same, compare, observe, plain, tensor, total
from support import WRAPS
from torch import nn
from torch.func import functional_call, grad, hessian, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_leaves

from funcckpt import MutationError, checkpoint, create_selective_checkpoint_contexts, policies, remat, scan
from funcckpt.nn import Remat, apply_remat


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


def tied():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


class Containers(nn.Module):
    """All kinds of tensors, some of them used by other ways than attributes of its own."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([tensor(3, seed=7), tensor(3, seed=8)])
        self.dict = nn.ParameterDict({"a": tensor(3, seed=9)})
        self.by_name = nn.ModuleDict({"norm": nn.LayerNorm(3), "layer": nn.Linear(3, 3)})
        self.register_buffer("hidden", tensor(3, seed=6), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x):
        weight, bias = self.by_name["layer"].parameters()
        named = dict(self.named_parameters())
        for p in self.list:
            x = torch.tanh(nn.functional.linear(x, weight, bias) * p) * named["by_name.layer.bias"]
        return self.by_name["norm"](x) * self.dict["a"] + self.hidden.sin() * self.count


class Hooked(nn.Module):
    """A hook on a layer, and its own forward patched by a partial, as libraries do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.register_forward_hook(lambda module, args, out: out * 2)
        self.layer.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        patched = functools.partial(lambda old, x: old(x) * 2, self.forward)
        self.forward = functools.update_wrapper(patched, self.forward)

    def forward(self, x):
        return self.layer(x)


def with_parametrization():
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), layer)


MODULES = {
    "tied": tied,
    "containers": Containers,
    "parametrized": with_parametrization,
    "hooked": Hooked,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
    "lstm": lambda: nn.LSTM(3, 3),
}


def build(name):
    torch.manual_seed(3)
    return MODULES[name]().double()


HOW = {
    "module": lambda wrap, child: wrap(child),
    "method": lambda wrap, child: wrap(child.forward),
    "argument": lambda wrap, child: functools.partial(wrap(lambda child, x: child(x)), child),
    "functional_call": lambda wrap, child: (
        lambda x: wrap(lambda p, x: functional_call(child, p, (x,)))(dict(child.named_parameters()), x)
    ),
}


class Block(nn.Module):
    """A module that remats its own child: what a user writes into a model."""

    def __init__(self, wrap, child, how):
        super().__init__()
        self.child = child
        self.run = HOW[how](wrap, child)

    def forward(self, x):
        return self.run(x)


# functional_call leaves a module that is held twice with the tensors that it was given.
WAYS = [(name, how) for name in MODULES for how in HOW if (name, how) != ("parametrized", "functional_call")]
FUNCTIONAL = [name for name in OBSERVATIONS if name != "grad_grad"]


def poisoned(module):
    """The module's tensors by name, once each; the module itself keeps NaN."""
    params = {k: v.detach().clone() for k, v in module.named_parameters()}
    buffers = {k: v.detach().clone() for k, v in module.named_buffers()}
    with torch.no_grad():
        for p in [*module.parameters(), *module.buffers()]:
            p.fill_(float("nan") if p.is_floating_point() else -1)
    return params, buffers


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("transform", FUNCTIONAL)
@pytest.mark.parametrize(("name", "how"), WAYS)
def test_functional_call_with_poisoned_originals(name, how, transform):
    """The recomputation comes after functional_call has put the (poisoned) originals back."""

    def run(wrap):
        model = Block(wrap, build(name), how)
        params, buffers = poisoned(model)
        call = lambda params, buffers, x: functional_call(model, {**params, **buffers}, (x,))
        out = observe(transform, call, (params, buffers, tensor(2, 3)))
        assert all(leaf.isfinite().all() for leaf in tree_leaves(out) if torch.is_tensor(leaf))
        return out

    compare(run, remat)


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_parameters_get_their_gradient_in_plain_eager(name, how):
    """`.grad` of each parameter, and None where it is frozen. Nothing is left on the module."""

    def run(wrap):
        model = Block(wrap, build(name), how)
        next(model.parameters()).requires_grad_(False)
        state = lambda: (
            [(id(p), type(p), {**vars(p)} if p.requires_grad else {}) for p in model.parameters()],
            [(m._forward_hooks.copy(), {*vars(m)}) for m in model.modules()],
        )
        before = state()
        x = tensor(2, 3, requires_grad=True)
        out = model(x)
        total(out).backward()
        assert state() == before
        return out, x.grad, {k: p.grad for k, p in model.named_parameters()}

    compare(run, remat)
    assert not remat(build("tied").requires_grad_(False))(tensor(2, 3)).requires_grad


def test_cached_parametrizations():
    """A recurrent cell, as torch's documentation of `parametrize.cached` has it."""
    cell = nn.RNNCell(3, 3, dtype=F64)
    runs = []

    class Sine(nn.Module):
        def forward(self, w):
            runs.append(None)
            return w.sin()

    parametrize.register_parametrization(cell, "weight_hh", Sine())
    xs = [tensor(2, 3, seed=i) for i in range(4)]
    loss = lambda f: functools.reduce(lambda h, x: f(x, h), xs, tensor(2, 3, seed=9)).sum()

    def run(wrap):
        bare = wrap(lambda p, x, h: functional_call(cell, p, (x, h)))
        with parametrize.cached():  # torch takes what it has cached for other parameters, too
            func = grad(lambda p: loss(lambda x, h: bare(p, x, h)))(dict(cell.named_parameters()))
        with parametrize.cached():
            y = loss(wrap(cell))
        return torch.autograd.grad(y, list(cell.parameters())), func

    want = run(plain)
    for wrap in WRAPS.values():
        runs.clear()
        assert_same(run(wrap), want)
        assert len(runs) == 2 * 2 * len(xs), "once in each forward, and once in each recomputation"
    with parametrize.cached(), pytest.raises(ZeroDivisionError):
        remat(lambda x: cell(x, x) / (1 // 0))(xs[0])
    assert parametrize._cache_enabled == 0


HOOKS = {
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3).eval()),
    "prune": lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5),
    # A recurrent layer also has a list of its weights.
    "weight_norm": lambda: nn.utils.weight_norm(nn.RNN(3, 3), "weight_hh_l0"),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    ("kind", "transform"),
    [(kind, transform) for kind in HOOKS for transform in ("backward", "grad")]
    + [("spectral_norm", "vmap_grad"), ("prune", "vmap_grad")],  # torch itself cannot batch the kernel of RNN
)
def test_weights_that_hooks_compute(kind, transform):
    def run(wrap):
        torch.manual_seed(0)
        module = HOOKS[kind]().double()
        found = observe(transform, lambda x: tree_leaves(wrap(module)(x))[0].sin(), (tensor(2, 3),))
        return found, [p.grad for p in module.parameters()]

    assert_same(run(remat), run(plain))


def test_an_embedding_with_a_largest_norm():
    """No version counter records its writes."""
    table = nn.Embedding(3, 3, max_norm=0.5, dtype=F64)
    f = remat(lambda i, x: table(i).sin() * x)
    with pytest.raises(MutationError, match="parameter 'weight'"):
        f(torch.tensor([1, 2]), tensor(2, 3, requires_grad=True))


@pytest.mark.parametrize("by", [*WRAPS, "nn.Remat"])
def test_lazy_module(by):
    def run(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.LazyLinear(4, dtype=F64), nn.Tanh(), nn.LazyLinear(2, dtype=F64))
        f, results = wrap(net), []
        for _ in range(3):
            net.zero_grad()
            out = f(tensor(2, 3))
            out.sum().backward()
            results.append((out, [p.grad for p in net.parameters()]))
        return results

    assert_same(run({**WRAPS, "nn.Remat": Remat}[by]), run(plain))


NET, X = nn.Linear(2, 1, dtype=F64), tensor(5, 2)
REPLACED = {name: p.detach().clone() for name, p in NET.named_parameters()}


@pytest.mark.parametrize("transform", [hessian, lambda f: grad(remat(f))])
def test_replaced_parameters_are_no_inputs(transform):
    """`functional_call` replaces the parameters, which require grad, before anything uses them."""
    loss = lambda wrap: wrap(lambda p: functional_call(NET, p, (X,)).pow(2).sum())
    found, want = (transform(loss(wrap))(REPLACED) for wrap in (remat, plain))
    assert_same(found, want)
    assert not any(x.requires_grad for x in tree_leaves(found))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_functional_call_in_a_graph(mode):
    """The module has parameters of its own, which fake tensors do not mix with."""
    step = lambda wrap: grad(lambda p, x: wrap(lambda p, x: functional_call(NET, p, (x,)).sin())(p, x).sum())
    graph = make_fx(step(remat), tracing_mode=mode)(REPLACED, X)
    assert_same(graph(REPLACED, X.sin()), step(plain)(REPLACED, X.sin()))


def test_a_graph_of_a_gradient_can_be_differentiated():
    """Also if what it was traced with requires grad."""
    w = torch.eye(X.shape[-1], dtype=X.dtype, requires_grad=True)

    def second(wrap):
        energy = wrap(lambda w: torch.tanh(X @ w).square().sum())
        graph = make_fx(lambda w: grad(energy)(w).square().sum())(w)
        return torch.autograd.grad(graph(w), w)

    assert_same(second(remat), second(plain))


def test_a_graph_of_a_backward_through_a_transform():
    """As AOTAutograd traces it: plain autograd differentiates what a transform has made of remat."""

    def step(wrap):
        energy = wrap(lambda w, x: torch.tanh(x @ w).square().sum())
        loss = lambda w: grad(energy, 1)(w, X).square().sum() + (w**2).sum()

        def gradient(w):
            w = w.detach().requires_grad_()
            return torch.autograd.grad(loss(w), w)[0]

        return gradient

    w = torch.eye(X.shape[-1], dtype=X.dtype)
    assert_same(make_fx(step(remat))(w)(w * 2), step(plain)(w * 2))


def test_a_keyword_argument_named_self():
    assert remat(lambda x, **options: x * options["self"])(torch.ones(()), self=2) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # the number of steps is that of the example
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(2, 2).double()

    def forward(self, x, xs):
        return scan(lambda carry, y: (torch.tanh(self.cell(carry) + y), None), x, xs)[0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_graph_of_torch_jit():
    for f in (remat(torch.sin), functools.partial(checkpoint, torch.sin)):
        traced = torch.jit.trace(lambda x, f=f: f(x), X.clone().requires_grad_())
        assert_same(traced(X * 2), (X * 2).sin())
    loop = lambda x: scan(lambda carry, y: (torch.tanh(carry + y), None), x, torch.ones(6, 1))[0]
    assert_same(torch.jit.trace(loop, X)(X * 2), loop(X * 2))
    learned = Recurrent()  # torch traces again under no_grad, and compares
    assert_same(torch.jit.trace(learned, (X[0], X))(X[1], X), learned(X[1], X))


class CallableModule(types.ModuleType):
    def __call__(self, x):
        return (x * self.w).sin().sum()


def test_a_module_of_a_library_that_is_called():
    """As in a package that gives itself a class with `__call__`."""
    module = CallableModule("numpy.pretended")

    def run(wrap):
        module.w = tensor(3)
        x = tensor(3, seed=1, requires_grad=True)
        y = wrap(module)(x)
        module.w = None
        return torch.autograd.grad(y, x)

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("wrap", [Remat, lambda m: Remat(m, policy=policies.dots_saveable)])
def test_a_graph_of_torch_fx(wrap):
    net = nn.Sequential(wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), nn.Linear(3, 1)).double()
    traced = torch.fx.Tracer().trace(net)
    assert {node.target for node in traced.nodes} >= {"0.0", "0.1", "1"}


class Wraps(nn.Module):
    def __init__(self, wrap, block):
        super().__init__()
        self.block, self.wrap = block, wrap

    def forward(self, x):
        return self.wrap(self.block)(x).tanh()


KEPT = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policies.dots_saveable)}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "wrap", [plain, remat, *[lambda f, o=o: functools.partial(checkpoint, f, **o) for o in ({}, KEPT)]]
)
def test_a_graph_of_torch_export(wrap, strict):
    block = nn.Sequential(nn.LayerNorm(X.shape[-1]), nn.Linear(X.shape[-1], 3)).double()
    model = Wraps(wrap, Remat(block) if wrap is plain else block)
    program = torch.export.export(model, (X,), strict=strict)
    assert_same(program.module()(X * 2), model(X * 2))
    assert "checkpoint" not in str(program.graph)


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_of_a_checkpoint_in_another_one_can_be_trained(strict):
    """Torch's own checkpoints would put changes of the grad mode into the graph."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model = nn.Sequential(nn.Sequential(nn.Linear(X.shape[-1], 3), inner), nn.Linear(3, 4)).double()
    expected = torch.autograd.grad(model(X).sum(), [*model.parameters()])
    apply_remat(model, lambda name, module: name in ("0", "0.1"))
    exported = torch.export.export(model, (X,), strict=strict).module()
    assert_same(torch.autograd.grad(exported(X).sum(), [*exported.parameters()]), expected)


def test_an_ensemble_of_stacked_modules():
    """As torch's tutorial has it: the module that is called has no memory of its own."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(3)]
    state, base = stack_module_state(nets), nets[0].to("meta")

    def run(wrap):
        call = lambda p, b, x: wrap(lambda x: functional_call(base, (p, b), (x,)))(x).sum()
        return vmap(vmap(grad(call), (None, None, 0)), (0, 0, None))(*state, tensor(5, 3))

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_the_lstm_of_torch_as_a_function(mode):
    """Its kernel, which is for float32, reads the grad mode below all transforms."""
    weights = [*build("lstm").float().parameters()]
    zero = torch.zeros(1, 2, 3)

    def f(x):
        return torch.lstm(x, (zero, zero), weights, True, 1, 0.0, False, False, True)[0].square().sum()

    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    with mode():
        ours, plain = grad(remat(f))(x), grad(f)(x)
    torch.testing.assert_close(ours.detach(), plain.detach())
    assert ours.requires_grad == plain.requires_grad


@pytest.mark.parametrize("name", ["parameters", "train", "to", "state_dict"])
def test_a_checkpointed_module_is_a_function(name):
    """Who takes it for a module is told the name of the one that is."""
    f = remat(nn.Linear(3, 3))
    with pytest.raises(
        AttributeError, match=rf"remat\(Linear\) is a function, and has no '{name}'.*nn\.Remat"
    ):
        getattr(f, name)
    assert not hasattr(f, "anything") and copy.deepcopy(f)._made_of[1] == "Linear"
