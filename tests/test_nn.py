"""Modules: `Remat`, `apply_remat`, `remove_remat`, `Sequential`.

The reference is a deep copy of the module that was never wrapped.
"""

import array
import copy
import inspect
import io
import itertools
import pickle
from abc import ABC, ABCMeta
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from oracles import F64, tensor
from support import Storages, assert_same, outcome
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import funcckpt
from funcckpt import CheckpointError, InputError, OptionError, policies
from funcckpt.meter import measure
from funcckpt.nn import Remat, Sequential, apply_remat, remove_remat


class Block(nn.Module):
    """Every kind of thing that a module may hold."""

    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width)
        # Its exponential is saved, not itself.
        self.log_scale = nn.Parameter(torch.zeros(width))
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.4)
        self.register_buffer("shift", torch.linspace(0, 1, width))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x, *, times=1.0):
        self.count = self.count + 1
        x = self.dropout(torch.tanh(self.linear(x)) * self.log_scale.exp() * (1 + self.shift))
        return self.norm(x) * times


def tied():
    block = Block()
    model = nn.Sequential(block, nn.Linear(3, 3), block)
    model[1].weight = block.linear.weight
    return model


MODELS = {
    "blocks": lambda: nn.Sequential(Block(), Block(), Block()),
    "tied": tied,
    "parametrized": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(3, 3)), parametrizations.weight_norm(nn.Linear(3, 3))
    ),
}
MM = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
CONTEXTS = partial(funcckpt.create_selective_checkpoint_contexts, MM)
WRAPS = {
    "each": lambda m: apply_remat(m, (Block, nn.Linear, nn.Dropout)),
    "in each other": lambda m: apply_remat(m, lambda name, _: "parametrizations" not in name),
    "contexts": lambda m: apply_remat(m, (Block, nn.Linear), context_fn=CONTEXTS),
    "debug": lambda m: apply_remat(m, "*", debug=True),
    "Sequential": lambda m: Sequential(*m),
    "Sequential of two": lambda m: Sequential(*m, every=2, skip_last=True),
}
X = tensor(5, 3)
gradients = lambda model: torch.autograd.grad(model(X).pow(3).sum(), list(model.parameters()))


def in_training(model):
    outs = [model(X * (i + 1)).pow(3).sum() for i in range(2)]
    return [torch.autograd.grad(out, list(model.parameters())) for out in outs], dict(model.named_buffers())


def of_other_state(model):
    """The parameters and buffers are the module's own again when the backward recomputes."""
    generator = torch.Generator().manual_seed(3)
    moved = lambda x: x.detach() + torch.rand(x.shape, generator=generator, dtype=F64).to(x.dtype)
    parameters = {k: moved(p).requires_grad_() for k, p in model.named_parameters()}
    buffers = {k: moved(b) for k, b in model.named_buffers()}
    out = functional_call(model, (parameters, buffers), (X,)).pow(3).sum()
    return out, torch.autograd.grad(out, list(parameters.values())), buffers


TRANSFORMS = {
    "vmap(grad)": lambda loss, p: vmap(grad(loss), (None, 0), randomness="different")(p, X),
    "grad(vmap)": lambda loss, p: grad(lambda p: vmap(loss, (None, 0), randomness="same")(p, X).sum())(p),
    "jvp(grad)": lambda loss, p: jvp(lambda x: grad(loss, argnums=1)(p, x), (X[0],), (X[1],)),
}


def of_samples(transform, model):
    model.eval()
    for module in model.modules():
        module.training = type(module).__name__.endswith("Dropout")
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    loss = lambda p, x: functional_call(model, (p, buffers), (x[None],)).pow(3).sum()
    return TRANSFORMS[transform](loss, parameters)


RUNS = {
    "training": in_training,
    "evaluation": lambda m: gradients(m.eval()),
    "functional_call": of_other_state,
    **{name: partial(of_samples, name) for name in TRANSFORMS},
}


def same_outcome(run, wrapped, plain):
    got, want = outcome(lambda: run(wrapped)), outcome(lambda: run(plain))
    assert want.error is None, want.error
    if got.error is not None:
        raise got.error
    assert_same(got.value, want.value)
    assert torch.equal(got.rng, want.rng)


def made(model):
    torch.manual_seed(0)
    return MODELS[model]().double()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("model", MODELS)
def test_as_without(model, wrap, run):
    if model == "parametrized" and run not in ("training", "functional_call"):
        run = "training"  # it updates a buffer, or torch has no rule
    plain = made(model)
    wrapped = WRAPS[wrap](copy.deepcopy(plain))
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    same_outcome(RUNS[run], wrapped, plain)


def test_the_module_is_the_same():
    block = Block()
    assert Remat(block, preserve_rng_state=False) is block
    assert isinstance(block, Block) and isinstance(block, Remat)
    assert repr(Remat(nn.Linear(2, 3))) == "RematLinear(in_features=2, out_features=3, bias=True)"


def test_its_forward_has_the_old_signature():
    """Libraries look there for what a block takes."""
    for model in (Block(), nn.TransformerEncoderLayer(4, 2)):
        before = inspect.signature(model.forward)
        assert inspect.signature(Remat(model).forward) == before
    assert inspect.signature(remove_remat(model).forward) == before


class OwnCopies(nn.Sequential):
    def __deepcopy__(self, memo):
        return type(self)(*copy.deepcopy([*self], memo))


class OwnPickles(nn.Sequential):
    def __reduce__(self):
        return type(self), (*self,)


@pytest.mark.parametrize("kind", [nn.Sequential, OwnCopies, OwnPickles])
def test_copies_and_slices_keep_the_options(kind):
    model = Remat(kind(Remat(nn.Linear(2, 2), policy=policies.dots_saveable), nn.Tanh()), early_stop=False)
    products = Remat(nn.Linear(2, 2), policy=[torch.ops.aten.addmm.default])
    assert type(copy.deepcopy(products)) is type(products)
    assert type(Remat(nn.Linear(2, 2))) is type(Remat(nn.Linear(2, 2), policy=None))
    for again in (copy.deepcopy(model), copy.copy(model), save_and_load(model), model[:1]):
        assert type(again) is type(model) and type(again[0]) is type(model[0])
    assert type(model)._funcckpt_options == {"early_stop": False}
    assert type(model[0])._funcckpt_options == {"policy": policies.dots_saveable}
    assert type(Remat(model[0]))._funcckpt_options == {}


@dataclass
class Asked:
    """A policy that is equal to others, or cannot be compared."""

    times: Any
    asked: int = 0

    def __call__(self, ctx, op, *args, **kwargs):
        self.asked += 1
        return True


@pytest.mark.parametrize("what", [1, torch.ones(2)], ids=["equal", "not comparable"])
def test_each_module_has_its_own_policy(what):
    ours = [Asked(what), Asked(what)]
    _, second = [Remat(nn.Linear(2, 2), policy=policy) for policy in ours]
    copy.deepcopy(second)(torch.ones(1, 2)).sum().backward()
    second(torch.ones(1, 2)).sum().backward()
    assert ours[0].asked == 0 < ours[1].asked


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, save_and_load])
def test_copies_are_checkpointed(copied):
    wrapped, plain = apply_remat(made("blocks"), Block), made("blocks")
    Remat(wrapped[0].eval(), preserve_rng_state=False, determinism_check="none")
    plain[0].eval()
    again = copied(wrapped)
    assert [type(part).__name__ for part in again] == ["RematBlock"] * 3
    assert type(again[0]) is type(wrapped[0])
    assert again[0]._funcckpt_options == {"preserve_rng_state": False, "determinism_check": "none"}
    if copied is not copy.copy:
        with torch.no_grad():
            [p.zero_() for p in wrapped.parameters()]
    same_outcome(gradients, again, plain)
    assert type(remove_remat(again)[0]) is Block


def test_torch_counts_the_flops_of_modules():
    """Its mode puts hooks on what modules are given, which a backward must not meet at a leaf."""
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.ones(2, 3, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        funcckpt.remat(net)(x).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * (2 * 2 * 3 * 3)


def test_other_instances_of_the_class():
    """What `type(module)(...)` and slices of a Sequential do."""
    chain = Remat(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    part, linear = chain[:2], type(Remat(nn.Linear(2, 2)))(4, 5)
    assert isinstance(part, Remat) and isinstance(linear, Remat) and linear.weight.shape == (5, 4)
    assert_same(part(torch.ones(1, 2)), nn.Sequential(*part)(torch.ones(1, 2)))


def test_other_instances_of_a_class_with_a_new_of_its_own():
    class Sized(nn.Linear):
        def __new__(cls, size, *, scale=1):
            made = super().__new__(cls)
            made.scale = scale
            return made

        def __init__(self, size, *, scale=1):
            super().__init__(size, size)

    other = type(Remat(Sized(2)))(3, scale=4)
    assert isinstance(other, Remat) and other.weight.shape == (3, 3) and other.scale == 4
    assert isinstance(Remat(module=Sized(size=2)), Remat)


def test_a_registry_of_classes_stays_as_it_is():
    registry = {}

    class Named(nn.Module):
        def __init_subclass__(cls, name, **options):
            super().__init_subclass__(**options)
            registry[name] = cls

    class Double(Named, name="double"):
        def forward(self, x):
            return 2 * x

    assert Remat(Double())(torch.ones(())) == 2 and registry == {"double": Double}


def test_a_registry_that_is_a_metaclass_stays_as_it_is():
    registry = {}

    class Registered(ABCMeta):
        def __new__(cls, name, bases, content, *, key):
            registry[key] = made = super().__new__(cls, name, bases, content)
            return made

        def __init__(cls, name, bases, content, *, key):
            super().__init__(name, bases, content)

    class Double(nn.Module, metaclass=Registered, key="double"):
        def forward(self, x):
            return 2 * x

    module = Remat(Double())
    assert module(torch.ones(())) == 2 and registry == {"double": Double}
    assert isinstance(module, Double) and type(type(module)) is Registered


def test_hooks_on_the_module_run_once():
    block, seen = Remat(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), []
    block.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    block.register_forward_hook(lambda m, args, out: seen.append("post"))
    block.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    block(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert seen == ["pre", "post", "backward"]


class Kept(nn.Module):
    """Counts how often the forward is run."""

    def __init__(self):
        super().__init__()
        self.runs = array.array("q", [0])  # a recomputation does not put it back

    def forward(self, x):
        self.runs[0] += 1
        return x.sin().sin()


@pytest.mark.parametrize(
    ("wrap", "runs", "kept"),
    [
        (lambda layers: nn.Sequential(*layers), [1] * 7, 14),
        (lambda layers: nn.Sequential(*map(Remat, layers)), [2] * 7, 7),
        # Early stop: what the last layer of a group returns is not needed, but its input is.
        (lambda layers: Sequential(*layers, every=3, skip_last=True), [2] * 6 + [1], 4),
    ],
)
def test_what_is_run_again_and_what_is_kept(wrap, runs, kept):
    model, x = wrap([Kept() for _ in range(7)]), torch.randn(1000, requires_grad=True)
    with torch.inference_mode():
        model(x)
    with Storages().known(x) as storages:
        out = model(x)
        assert storages.live == kept * x.nbytes
        out.sum().backward()
    assert [layer.runs[0] - 1 for layer in model] == runs


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: torch.sin, "use funcckpt.remat for functions"),
        (lambda: nn.Linear, r"not a class: write Remat\(Linear\(...\)\)"),
        (lambda: 3, "takes an nn.Module, not int"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), "has no forward"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
        (lambda: torch.compile(nn.Linear(2, 2)), "assigned to this instance"),
        (lambda: type("Abstract", (ABC, nn.Linear), {})(2, 2), "nn.Module be the first base"),
    ],
)
def test_what_cannot_be_wrapped(make, message):
    with pytest.raises(InputError, match=message):
        Remat(make())


@pytest.mark.parametrize("wrap", [lambda m, **o: Remat(m, **o), lambda m, **o: Sequential(m, **o)])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": 3}, "function or a list of ops, not 3"),
        ({"policy": policies.budget}, "budget does not take.*call it"),
        ({"policy": policies.save_from_both_policies}, "save_from_both_policies does not take"),
        ({"policy": lambda prim, *_, **params: True}, "policy of JAX has no ctx"),
        ({"policy": ["mm"]}, "Expected op in `op_list`"),
        ({"determinism_check": "value"}, r"must be one of \('default', 'none', 'values'\)"),
        ({"context_fn": 3}, "must be a function, not 3"),
        ({"policy": [], "context_fn": lambda: None}, "not both"),
        ({"use_reentrant": True}, r"no option .*The options are .*'context_fn'"),
    ],
)
def test_options_are_checked_at_once(wrap, options, message):
    module = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=message):
        wrap(module, **options)
    assert type(module) is nn.Linear
    if not {"context_fn", "use_reentrant"} & {*options}:
        with pytest.raises(InputError, match=r"^remat\("):
            funcckpt.remat(torch.sin, **options)


def test_other_options():
    parametrized = parametrizations.weight_norm(Remat(nn.Linear(3, 3)))
    with pytest.raises(InputError, match="changed again"):
        remove_remat(parametrized)
    with pytest.raises(OptionError, match="one module"):
        Remat(nn.Linear(2, 2), nn.Linear(2, 2))
    for every in (0, 1.5, None):
        with pytest.raises(OptionError, match=f"every={every}"):
            Sequential(nn.Linear(2, 2), every=every)
    with pytest.raises(OptionError, match="policy= or context_fn="):
        funcckpt.checkpoint(torch.sin, X, policy=policies.dots_saveable, context_fn=CONTEXTS)


def test_remat_of_a_module_is_no_module():
    """What would lose parameters says so where it happens; a function of what is registered says nothing."""
    model = nn.Module()
    with pytest.warns(
        UserWarning, match=r"Module\.head: remat\(Linear\) .*Write funcckpt\.nn\.Remat\("
    ) as said:
        model.head = funcckpt.remat(nn.Linear(2, 2))
    assert said[0].filename == __file__
    model.linear = nn.Linear(2, 2)
    model.again = funcckpt.remat(model.linear)
    model.act, model.frozen = funcckpt.remat(nn.Tanh()), funcckpt.remat(nn.Linear(2, 2).requires_grad_(False))
    assert [name for name, _ in model.named_modules()] == ["", "linear"]
    linear = funcckpt.remat(nn.Linear(2, 2))
    for assign in (nn.ModuleList, lambda ls: nn.Sequential(*ls), lambda ls: setattr(model, "linear", *ls)):
        with pytest.raises(InputError, match=r"Write funcckpt\.nn\.Remat"):
            assign([linear])


class Parent(nn.Module):
    pass


class Model(Parent):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(5)])
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


wrapped_names = lambda model: [name for name, m in model.named_modules() if isinstance(m, Remat)]
# Blocks of two parts, in a list that has no forward.
PAIRS = lambda: nn.ModuleList([nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Tanh())]) for _ in range(3)])
# Some models have longer names, as peft and data parallelism give them.
LONGER = lambda: nn.ModuleDict({"inner": nn.ModuleDict({"model": Model()})})
LAYERS = [f"layers.{i}" for i in range(5)]


@pytest.mark.parametrize(
    "select, names, make",
    [
        (nn.Sequential, [*LAYERS, "head"], Model),
        (((nn.Tanh,), nn.Conv1d), [*[f"layers.{i}.1" for i in range(5)], "head.1"], Model),
        ("layers.*", LAYERS, Model),
        ("every 2", ["layers.0", "layers.2", "layers.4", "head.0", "head.2"], Model),
        ("every 2", ["0.0", "0.1", "2.0", "2.1"], PAIRS),
        (
            "every 1",
            ["0", "2"],
            lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)),
        ),
        ("Tanh", [*[f"layers.{i}.1" for i in range(5)], "head.1"], Model),
        ("*.layers.*", [f"inner.model.{name}" for name in LAYERS], LONGER),
        ("layers.*", [f"inner.model.{name}" for name in LAYERS], LONGER),
    ],
)
def test_select(select, names, make):
    model = make()
    assert apply_remat(model, select) is model
    assert wrapped_names(model) == names
    assert remove_remat(model) is model
    assert not any(isinstance(m, Remat) or hasattr(m, "_funcckpt_options") for m in model.modules())


@pytest.mark.parametrize(
    "select, message",
    [
        (nn.Conv2d, "selects nothing in Model.*or pass 'every 1'"),
        ("every 0", "'every 0' selects nothing"),
        (("0", "1"), r"select=\('0', '1'\) is not a class"),
        (lambda module: True, "select= takes a name and a module: lambda name, module"),
        (3, "select=3 is not a class or a tuple of them"),
        (nn.Linear(2, 2), "select= takes no Linear. Pass its class or name; or use Remat on it"),
        (lambda name, m: name in ("embed", "layers"), "has no forward"),  # all or nothing
        ("Parent", "has no forward"),
    ],
)
def test_select_errors(select, message):
    model = Model()
    with pytest.raises(InputError, match=message):
        apply_remat(model, select)
    with pytest.raises(InputError, match="takes a module, not a function"):
        apply_remat(lambda x: x, select)
    assert wrapped_names(model) == []


def test_apply_again_replaces_the_options():
    model = apply_remat(apply_remat(Model(), "layers.*"), "layers.0", preserve_rng_state=False)
    assert wrapped_names(model) == LAYERS
    assert [m._funcckpt_options for m in model.layers][:2] == [{"preserve_rng_state": False}, {}]


def test_sequential_slices_and_copies():
    chain = Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Tanh(), c=nn.Linear(3, 3)), every=2, debug=True)
    part = pickle.loads(pickle.dumps(copy.deepcopy(chain)[1:]))
    assert type(part) is Sequential and list(part._modules) == ["b", "c"]
    assert (part.every, part.skip_last, part.options) == (2, False, {"debug": True})
    assert type(chain[0]) is nn.Linear
    assert_same(Sequential()(X), X)


def test_sequential_compiles():
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]).double()
    wrapped = Sequential(*copy.deepcopy(plain), every=2)
    torch._dynamo.reset()
    same_outcome(gradients, torch.compile(wrapped, backend="aot_eager", fullgraph=True), plain)


class Checkpointing(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = funcckpt.checkpoint(block, x, **self.options)
        return x


def of_checkpoints(blocks, **options):
    model = Checkpointing(*blocks)
    model.options = options
    return model


WAYS = {
    "Remat": lambda blocks, **options: nn.Sequential(*[Remat(b, **options) for b in blocks]),
    "Sequential": lambda blocks, **options: Sequential(*blocks, **options),
    "checkpoint": of_checkpoints,
}


def cost(wrap, run):
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
    model = wrap([block() for _ in range(8)]).double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.rand(8, 64, 64, dtype=F64, requires_grad=True)

    def call():
        if run == "eager":
            return torch.autograd.grad(model(x).sin().sum(), [*model.parameters()])
        if run == "twice":
            (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return torch.autograd.grad(g.square().sum(), [*model.parameters()], allow_unused=True)
        loss = lambda p, x: functional_call(model, p, (x,)).sin().sum()
        return [*vmap(grad(loss), (None, 0))(parameters, x.detach()).values()]

    call()  # what need not run again is known
    return measure(call)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("run", "policy"),
    [("eager", MM), ("per sample", policies.budget(fraction=0.6)), ("twice", policies.nothing_saveable)],
)
def test_policies_of_modules(way, run, policy):
    """With hooks the second backward saves nothing: the first puts all activations into its own graph."""
    plain, none = cost(lambda blocks: nn.Sequential(*blocks), run), cost(WAYS[way], run)
    again = (lambda model: model) if way == "checkpoint" else lambda m: pickle.loads(pickle.dumps(m))
    kept = cost(lambda blocks: again(WAYS[way](blocks, policy=policy)), run)
    assert_same(kept.result, plain.result)
    if run == "twice":
        assert kept.peak_bytes < 0.6 * plain.peak_bytes
    else:
        assert plain.flops <= kept.flops < none.flops and kept.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("way", WAYS)
def test_values_that_differ_are_an_error(way):
    class Impure(nn.Module):
        def forward(self, x):
            return x.sin() * array.array("d", [next(numbers)])[0]

    numbers = itertools.count(1)
    with pytest.raises(CheckpointError, match=r"Impure|forward|chain"):
        WAYS[way]([Impure()], determinism_check="values")(X.clone().requires_grad_()).sum().backward()
