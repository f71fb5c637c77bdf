"""Modules: `Remat`, `apply_remat`, `remove_remat`, `Sequential`.

The reference is a deep copy of the module that was never wrapped.
"""

import array
import copy
import gc
import io
import itertools
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
from support import Storages, assert_same, outcome
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.utils import parametrizations, parametrize

import funcckpt
from funcckpt import CheckpointError, OptionError, policies
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
        self.note = "a block"

    def forward(self, x, *, times=1.0):
        self.count = self.count + 1
        x = self.dropout(torch.tanh(self.linear(x)) * self.log_scale.exp() * (1 + self.shift))
        return self.norm(x) * times

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, note):
        self.note = note


class Kept(nn.Module):
    """Counts how often the forward is run."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        # What a recomputation does not put back.
        self.runs = array.array("q", [0])

    def forward(self, x):
        self.runs[0] += 1
        return self.f(x)


def build(depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(depth)]).double()


@pytest.fixture
def pair():
    """A model with all blocks wrapped, and the same model without."""
    plain = build()
    return apply_remat(copy.deepcopy(plain), Block), plain


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model, x=X):
    parameters = list(model.parameters())
    return torch.autograd.grad(model(x).pow(3).sum(), parameters)


def same_outcome(run, wrapped, plain):
    got, want = outcome(lambda: run(wrapped)), outcome(lambda: run(plain))
    assert want.error is None, want.error
    if got.error is not None:
        raise got.error
    assert_same(got.value, want.value)
    assert torch.equal(got.rng, want.rng)


# -- what a module is ----------------------------------------------------------------------------


def test_the_module_is_the_same():
    block = Block()
    assert Remat(block, preserve_rng_state=False) is block
    assert isinstance(block, Block) and isinstance(block, Remat)
    assert block.note == "a block" and block.linear.in_features == 3


def test_repr_tells():
    assert repr(Remat(nn.Linear(2, 3))) == "RematLinear(in_features=2, out_features=3, bias=True)"


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_are_checkpointed(pair, copied):
    wrapped, plain = pair
    Remat(wrapped[0], preserve_rng_state=False, determinism_check="none")
    again = copied(wrapped)
    assert [type(part).__name__ for part in again] == ["RematBlock"] * 3
    assert type(again[0]) is type(wrapped[0])
    wrapped[0].eval(), plain[0].eval(), again[0].eval()  # draws nothing
    same_outcome(gradients, again, plain)
    # The options came along.
    assert again[0]._funcckpt_options == {"preserve_rng_state": False, "determinism_check": "none"}
    remove_remat(again)
    assert type(again[0]) is Block


def test_a_deep_copy_is_independent(pair):
    wrapped, plain = pair
    again = copy.deepcopy(wrapped)
    with torch.no_grad():
        for p in wrapped.parameters():
            p.zero_()
    same_outcome(gradients, again, plain)


class Odd(nn.Linear):
    """Says itself how it is pickled."""

    def __reduce__(self):
        return type(self)._make, (self.in_features,), {**self.__dict__}

    @classmethod
    def _make(cls, n):
        return cls(n, n)


def test_a_module_that_reduces_itself():
    module = Remat(Odd(2, 2))
    again = copy.deepcopy(module)
    assert isinstance(again, Remat) and isinstance(again, Odd)
    assert_same(again(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_another_instance_of_the_class():
    """What `type(module)(...)` and slices of a Sequential do."""
    chain = Remat(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    part = chain[:2]
    assert isinstance(part, Remat) and len(part) == 2
    assert_same(part(torch.ones(1, 2)), nn.Sequential(*part)(torch.ones(1, 2)))
    other = type(chain[0])(4, 5)
    assert other.weight.shape == (5, 4)
    linear = type(Remat(nn.Linear(2, 2)))(4, 5)
    assert isinstance(linear, Remat) and linear.weight.shape == (5, 4)


def test_hooks_on_the_module_run_once():
    block, seen = Remat(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), []
    block.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    block.register_forward_hook(lambda m, args, out: seen.append("post"))
    block.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    block(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert seen == ["pre", "post", "backward"]


def test_features_are_taken_by_a_hook_under_a_transform(pair):
    def features(model):
        def f(x):
            found = []
            handle = model[1].register_forward_hook(lambda m, args, out: found.append(out))
            model(x)
            handle.remove()
            return found[0].sum()

        return grad(f)(X)

    for m in pair:
        m.eval()
    same_outcome(features, *pair)


# -- gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_plain_backward(pair, train):
    wrapped, plain = pair
    wrapped.train(train), plain.train(train)
    same_outcome(gradients, wrapped, plain)
    assert_same(dict(wrapped.named_buffers()), dict(plain.named_buffers()))  # count and statistics


def test_keyword_arguments_named_like_options():
    class Named(nn.Module):
        def forward(self, x, debug, function=2.0, context_fn=None):
            return x.sin() * debug * function

    module = Remat(Named())
    x = torch.ones(2, requires_grad=True)
    module(x, debug=3.0, function=4.0, context_fn="c").sum().backward()
    assert_same(x.grad, 12 * torch.ones(2).cos())


def test_the_forward_is_recomputed_and_not_kept():
    def total(x):
        for _ in range(10):
            x = x.sin()
        return x

    for wrap, runs in [(Remat, 2), (lambda m: m, 1)]:
        module = wrap(Kept(total))
        x = torch.randn(1000, requires_grad=True)
        with Storages().known(x) as storages:
            out = module(x)
            kept = storages.live
            out.sum().backward()
        assert module.runs[0] == runs
        assert kept == (8000 // 2 if runs == 2 else 40000)


def test_no_grad_runs_once():
    module = Remat(Kept(torch.sin))
    with torch.no_grad():
        module(torch.ones(2))
    with torch.inference_mode():
        module(torch.ones(2))
    assert module.runs[0] == 2


def states(model):
    return {k: p.detach() for k, p in model.named_parameters()}, dict(model.named_buffers())


def loss_of(model, buffers):
    def loss(parameters, x):
        return functional_call(model, (parameters, buffers), (x[None],)).pow(3).sum()

    return loss


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss, p: vmap(grad(loss), (None, 0))(p, X),
        lambda loss, p: grad(lambda p: vmap(loss, (None, 0))(p, X).sum())(p),
        lambda loss, p: jvp(lambda p: loss(p, X[0]), (p,), (p,)),
        lambda loss, p: vmap(jacrev(loss, argnums=1), (None, 0))(p, X),
        lambda loss, p: hessian(loss, argnums=1)(p, X[0]),
    ],
    ids=["vmap(grad)", "grad(vmap)", "jvp", "vmap(jacrev)", "hessian"],
)
def test_transforms(pair, transform):
    wrapped, plain = pair
    wrapped.eval(), plain.eval()
    same_outcome(lambda m: transform(loss_of(m, states(m)[1]), states(m)[0]), wrapped, plain)


def test_per_sample_gradients_with_dropout(pair):
    wrapped, plain = pair
    for m in pair:
        m.eval()
        for block in m:
            block.dropout.train()

    def run(m):
        parameters, buffers = states(m)
        return vmap(grad(loss_of(m, buffers)), (None, 0), randomness="different")(parameters, X)

    same_outcome(run, wrapped, plain)


# -- plain eager code: other parameters than in the recomputation ------------------------------------


def other_state(model, kind):
    """Parameters and buffers that are not the model's own."""
    generator = torch.Generator().manual_seed(3)

    def moved(x):
        return x.detach() + torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    make = nn.Parameter if kind == "Parameter" else torch.Tensor.requires_grad_
    parameters = {k: make(moved(p)) for k, p in model.named_parameters()}
    if kind == "own":
        parameters = dict(model.named_parameters())
    return parameters, {k: moved(b) for k, b in model.named_buffers()}


@pytest.mark.parametrize("kind", ["Parameter", "tensor", "own"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_functional_call_before_a_plain_backward(pair, kind, train):
    """The parameters and buffers are the module's own again when the backward recomputes."""

    def run(m):
        m.train(train)
        parameters, buffers = other_state(m, kind)
        out = functional_call(m, (parameters, buffers), (X,)).pow(3).sum()
        after = dict(m.named_parameters())
        derivatives = torch.autograd.grad(out, list(parameters.values()))
        assert all(after[k] is p for k, p in m.named_parameters())
        return out, derivatives, buffers

    same_outcome(run, *pair)


def test_a_parameter_that_was_changed_in_place():
    """Autograd would not notice: what is saved is the exponential."""
    module = Remat(Block().double())
    out = module(X).sum()
    with torch.no_grad():
        module.log_scale.add_(1)
    with pytest.raises(funcckpt.MutationError, match=r"'log_scale'.*float64\[3\].*changed in place"):
        out.backward()
    Remat(module, determinism_check="none")
    out = module(X).sum()
    with torch.no_grad():
        module.log_scale.add_(1)
    out.backward()


@pytest.mark.parametrize("forwards", [1, 2])
def test_buffers_that_a_forward_updates(forwards):
    """Power iterations: the recomputation starts from the vectors of its forward."""

    class Power(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = parametrizations.spectral_norm(nn.Linear(3, 3))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return torch.tanh(self.linear(x) - self.mean.exp())

    torch.manual_seed(0)
    plain = nn.Sequential(Power(), Power()).double()
    wrapped = apply_remat(copy.deepcopy(plain), Power)

    def run(m):
        outs = [m(X * (i + 1)).pow(3).sum() for i in range(forwards)]
        return [torch.autograd.grad(out, list(m.parameters())) for out in outs], dict(m.named_buffers())

    same_outcome(run, wrapped, plain)


def test_nothing_is_kept_of_earlier_forwards():
    """A result that the module stores is not held by the next call."""

    class Stores(nn.Linear):
        last = None

        def forward(self, x):
            self.last = super().forward(x).exp()
            return self.last * 2

    model = Remat(Stores(3, 3))
    dead, outs = [], []
    for _ in range(3):
        outs.append(model(torch.ones(1, 3)))
        weakref.finalize(model.last, dead.append, 1)
    del outs[:2]
    gc.collect()
    assert len(dead) == 2


def test_a_transform_inside_of_the_module():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3).double()
            self.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float64))

        def forward(self, x):
            return jacrev(lambda x: torch.tanh(self.linear(x)) * self.scale)(x)

    plain = Inner()
    wrapped = Remat(copy.deepcopy(plain))
    for _ in range(2):
        same_outcome(lambda m: gradients(m, X[0]), wrapped, plain)

    def run(m):
        parameters, buffers = other_state(m, "tensor")
        return torch.autograd.grad(
            functional_call(m, (parameters, buffers), (X[0],)).sum(), list(parameters.values())
        )

    same_outcome(run, wrapped, plain)


def test_selective_contexts():
    from functools import partial

    def policy(ctx, op, *args, **kwargs):
        keep = op is torch.ops.aten.mm.default
        Policy = funcckpt.CheckpointPolicy
        return Policy.MUST_SAVE if keep else Policy.PREFER_RECOMPUTE

    context_fn = partial(funcckpt.create_selective_checkpoint_contexts, policy)
    plain = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()).double()
    wrapped = Remat(copy.deepcopy(plain), context_fn=context_fn)
    same_outcome(gradients, wrapped, plain)
    same = grad(lambda x: wrapped(x).sum())(X), grad(lambda x: plain(x).sum())(X)
    torch.testing.assert_close(*same)


def test_debug_goes_without_contexts():
    plain = Block().double()
    wrapped = Remat(copy.deepcopy(plain), debug=True)
    same_outcome(gradients, wrapped, plain)
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        same_outcome(gradients, Remat(wrapped), plain)


def test_shared_modules_and_tied_weights():
    torch.manual_seed(0)
    shared = Block().double()
    plain = nn.Sequential(shared, nn.Linear(3, 3).double(), shared)
    plain[1].weight = shared.linear.weight
    wrapped = apply_remat(copy.deepcopy(plain), (Block, nn.Linear))
    assert wrapped[0] is wrapped[2]
    same_outcome(gradients, wrapped, plain)


def test_nested():
    torch.manual_seed(0)
    plain = nn.Sequential(build(2), build(2))
    wrapped = apply_remat(
        copy.deepcopy(plain), lambda name, m: isinstance(m, (Block, nn.Sequential)) and name
    )
    same_outcome(gradients, wrapped, plain)


@pytest.mark.parametrize("first", ["Remat", "parametrization"])
def test_parametrizations(first):
    def make(wrap):
        torch.manual_seed(0)
        module = nn.Linear(3, 3).double()
        steps = [wrap, parametrizations.weight_norm]
        for step in steps if first == "Remat" else steps[::-1]:
            module = step(module)
        assert parametrize.is_parametrized(module)
        return module

    same_outcome(gradients, make(Remat), make(lambda m: m))
    if first == "Remat":
        with pytest.raises(funcckpt.InputError, match="changed again"):
            remove_remat(make(Remat))


# -- errors -----------------------------------------------------------------------------------------


class Compiled(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.forward = super().forward


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: torch.sin, "use funcckpt.remat for functions"),
        (lambda: 3, "takes an nn.Module, not int"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), "has no forward"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "TorchScript"),
        (Compiled, "assigned to this instance"),
    ],
    ids=["function", "number", "ModuleList", "ScriptModule", "forward"],
)
def test_what_cannot_be_wrapped(make, message):
    with pytest.raises(funcckpt.InputError, match=message):
        Remat(make())


def test_options_that_do_not_exist():
    for call in (
        lambda: Remat(nn.Linear(2, 2), polcy=1),
        lambda: Sequential(nn.Linear(2, 2), use_reentrant=True),
    ):
        with pytest.raises(funcckpt.OptionError, match=r"no option .*The options are .*'context_fn'"):
            call()
    with pytest.raises(funcckpt.OptionError, match="one module"):
        Remat(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("wrap", [lambda m, **o: Remat(m, **o), lambda m, **o: Sequential(m, **o)])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": 3}, "function or a list of ops, not 3"),
        ({"policy": "dots_saveable"}, r"not 'dots_saveable'. Write, for example, funcckpt\.policies\."),
        ({"policy": torch.ops.aten.mm.default}, "function or a list of ops"),
        ({"policy": policies.budget}, "budget does not take.*call it"),
        ({"policy": policies.save_only_these_names}, "save_only_these_names does not take"),
        ({"policy": policies.save_from_both_policies}, "save_from_both_policies does not take"),
        ({"policy": lambda prim, *_, **params: True}, "policy of JAX has no ctx"),
        ({"policy": ["mm"]}, "Expected op in `op_list`"),
        ({"determinism_check": "value"}, "one of default, none, values"),
        ({"context_fn": 3}, "must be a function, not 3"),
        ({"policy": [], "context_fn": lambda: None}, "not both"),
    ],
)
def test_options_are_checked_at_once(wrap, options, message):
    module = nn.Linear(2, 2)
    with pytest.raises(funcckpt.OptionError, match=message):
        wrap(module, **options)
    assert type(module) is nn.Linear
    if "context_fn" not in options:
        with pytest.raises(funcckpt.InputError, match=r"^remat\("):
            funcckpt.remat(torch.sin, **options)


def test_a_list_of_operators_is_pickled():
    policy = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    again = pickle.loads(pickle.dumps(mlp(WAYS["Remat"](policy=policy))))
    found, _ = cost(again, "eager")
    expected, _ = cost(mlp(WAYS["Remat"](policy=policies.dots_saveable)), "eager")
    assert found.flops == expected.flops


# -- a function in place of a module ------------------------------------------------------------------


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
    same = copy.deepcopy(model.again), pickle.loads(pickle.dumps(model.again)), model.again
    assert len({f(torch.ones(1, 2)) for f in same}) == 3 and not isinstance(model.again, nn.Module)
    linear = funcckpt.remat(nn.Linear(2, 2))
    for assign in (
        lambda: nn.ModuleList([linear]),
        lambda: nn.Sequential(linear),
        lambda: setattr(model, "linear", linear),
    ):
        with pytest.raises(funcckpt.InputError, match=r"Write funcckpt\.nn\.Remat"):
            assign()


# -- whole models -------------------------------------------------------------------------------------


class Parent(nn.Module):
    pass


class Model(Parent):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(5)])
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped_names(model):
    return [name for name, m in model.named_modules() if isinstance(m, Remat)]


@pytest.mark.parametrize(
    "select, names",
    [
        (nn.Sequential, ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "head"]),
        ((nn.Tanh, Model), ["", *[f"layers.{i}.1" for i in range(5)], "head.1"]),
        ("layers.*", [f"layers.{i}" for i in range(5)]),
        ("layers.[0-2]", ["layers.0", "layers.1", "layers.2"]),
        ("*.0", ["layers.0", "head.0"]),
        ("embed", ["embed"]),
        ("every 2", ["layers.0", "layers.2", "layers.4", "head.0", "head.2"]),
        ("every 5", ["layers.0", "head.0"]),
        (lambda name, m: name.endswith("3"), ["layers.3"]),
        ("Tanh", [*[f"layers.{i}.1" for i in range(5)], "head.1"]),
        ("Parent", [""]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_select(select, names):
    model = Model()
    assert apply_remat(model, select) is model
    assert wrapped_names(model) == names
    assert remove_remat(model) is model
    assert wrapped_names(model) == []
    assert all(
        "Remat" not in type(m).__name__ and not hasattr(m, "_funcckpt_options") for m in model.modules()
    )


@pytest.mark.parametrize("pattern", ["*.layers.*", "layers.*", "inner.model.layers.*"])
def test_select_in_a_model_that_was_wrapped(pattern):
    """As peft and data parallelism do: names are longer then."""
    model = nn.ModuleDict({"inner": nn.ModuleDict({"model": Model()})})
    assert wrapped_names(apply_remat(model, pattern)) == [f"inner.model.layers.{i}" for i in range(5)]


@pytest.mark.parametrize(
    "select, error, message",
    [
        (nn.Conv2d, funcckpt.InputError, r"selects nothing in Model.*such as 'layers\.\*'"),
        ("layer.*", funcckpt.InputError, "'layer.\\*' selects nothing"),
        ("layers", funcckpt.InputError, "has no forward"),
        ("every 0", funcckpt.InputError, "'every 0' selects nothing"),
        (3, funcckpt.InputError, "select=3 is not a class, a pattern or a function"),
    ],
)
def test_select_errors(select, error, message):
    model = Model()
    with pytest.raises(error, match=message):
        apply_remat(model, select)
    assert wrapped_names(model) == []


def test_all_or_nothing():
    model = Model()
    with pytest.raises(funcckpt.InputError):
        apply_remat(model, lambda name, m: name in ("embed", "layers"))
    assert wrapped_names(model) == []


def test_apply_again_replaces_the_options():
    model = apply_remat(Model(), "layers.*")
    apply_remat(model, "layers.0", preserve_rng_state=False)
    assert wrapped_names(model) == [f"layers.{i}" for i in range(5)]
    assert [m._funcckpt_options for m in model.layers][:2] == [{"preserve_rng_state": False}, {}]


# -- Sequential -----------------------------------------------------------------------------------------


def layers(n=7):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.3)).double() for _ in range(n)]


@pytest.mark.parametrize("every", [1, 2, 3, 10])
@pytest.mark.parametrize("skip_last", [True, False])
def test_sequential(every, skip_last):
    wrapped, plain = Sequential(*layers(), every=every, skip_last=skip_last), nn.Sequential(*layers())
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    same_outcome(gradients, wrapped, plain)

    def run(m):
        return vmap(jacrev(lambda x: m(x).sum()), randomness="different")(X)

    same_outcome(run, wrapped, plain)

    def call(m):
        parameters, buffers = other_state(m, "tensor")
        out = functional_call(m, (parameters, buffers), (X,)).pow(3).sum()
        return torch.autograd.grad(out, list(parameters.values()))

    same_outcome(call, wrapped, plain)


def test_sequential_counts():
    """Which layers are run again, and how many inputs are kept."""
    chain = Sequential(*[Kept(torch.sin) for _ in range(7)], every=3, skip_last=True)
    x = torch.randn(1000, requires_grad=True)
    with Storages().known(x) as storages:
        out = chain(x)
        kept = storages.live
        out.sum().backward()
    # Early stop: what the last layer of a group returns is not needed, but its input is.
    assert [layer.runs[0] for layer in chain] == [2, 2, 2, 2, 2, 2, 1]
    assert kept == 3 * 4000  # inputs of the second group and of the last layer, and the output


def test_sequential_slices_and_copies():
    chain = Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Tanh(), c=nn.Linear(3, 3)), every=2, debug=True)
    part = copy.deepcopy(chain)[1:]
    assert type(part) is Sequential and list(part._modules) == ["b", "c"]
    assert (part.every, part.skip_last, part.options) == (2, False, {"debug": True})
    assert type(chain[0]) is nn.Linear
    assert pickle.loads(pickle.dumps(chain)).every == 2
    assert_same(Sequential()(X), X)


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_sequential_errors(every):
    with pytest.raises(funcckpt.OptionError, match=f"every={every}"):
        Sequential(nn.Linear(2, 2), every=every)


def test_sequential_compiles():
    wrapped, plain = Sequential(*layers(4), every=2).eval(), nn.Sequential(*layers(4)).eval()
    torch._dynamo.reset()
    same_outcome(gradients, torch.compile(wrapped, backend="aot_eager", fullgraph=True), plain)


# ---------------------------------------------------------------- the options that a function has


def mlp(wrap, depth=4, width=64):
    torch.manual_seed(0)
    block = lambda: nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.GELU()
    )
    return wrap([block() for _ in range(depth)]).double()


class Checkpointing(nn.Module):
    def __init__(self, blocks, options):
        super().__init__()
        self.blocks, self.options = nn.ModuleList(blocks), options

    def forward(self, x):
        for block in self.blocks:
            x = funcckpt.checkpoint(block, x, **self.options)
        return x


WAYS = {
    "Remat": lambda **options: lambda blocks: nn.Sequential(*[Remat(b, **options) for b in blocks]),
    "apply_remat": lambda **options: (
        lambda blocks: apply_remat(nn.Sequential(nn.Sequential(*blocks)), "0.*", **options)
    ),
    "Sequential": lambda **options: lambda blocks: Sequential(*blocks, **options),
    "checkpoint": lambda **options: lambda blocks: Checkpointing(blocks, options),
}


def cost(model, run):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.rand(8, 64, 64, dtype=torch.float64)

    def call():
        if run == "eager":
            return torch.autograd.grad(model(x).sin().sum(), [*model.parameters()])
        loss = lambda p, x: functional_call(model, p, (x,)).sin().sum()
        return [*vmap(grad(loss), (None, 0))(parameters, x).values()]

    call()  # what need not run again is known
    measured = measure(call)
    return measured, call()


@pytest.mark.parametrize("run", ["eager", "per sample"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "policy",
    [
        policies.dots_saveable,
        [torch.ops.aten.addmm.default, torch.ops.aten.mm.default],
        policies.budget(fraction=0.6),
    ],
    ids=["dots", "list", "budget"],
)
def test_policies_of_modules(policy, way, run):
    plain, expected = cost(mlp(lambda blocks: nn.Sequential(*blocks)), run)
    none, _ = cost(mlp(WAYS[way]()), run)
    kept, found = cost(mlp(WAYS[way](policy=policy)), run)
    assert_same(found, expected)
    assert plain.flops <= kept.flops < none.flops
    assert kept.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("way", WAYS)
def test_values_that_differ_are_an_error(way):
    class Impure(nn.Module):
        def forward(self, x):
            return x.sin() * array.array("d", [next(numbers)])[0]

    numbers = itertools.count(1)
    with pytest.raises(CheckpointError, match=r"Impure|forward|chain"):
        WAYS[way](determinism_check="values")([Impure()])(X.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_the_second_backward_saves_memory_by_remat(way):
    """With hooks it saves nothing: the first backward puts all activations into its own graph."""

    def peak(wrap):
        model, x = mlp(wrap, depth=8), torch.rand(512, 64, dtype=torch.float64, requires_grad=True)

        def run():
            (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return torch.autograd.grad(g.square().sum(), [*model.parameters()], allow_unused=True)

        run()
        return measure(run).peak_bytes, run()

    plain, expected = peak(lambda blocks: nn.Sequential(*blocks))
    found, gradients = peak(WAYS[way](policy=policies.nothing_saveable))
    assert_same(gradients, expected)
    assert found < 0.6 * plain


def test_a_policy_beside_contexts_is_refused():
    context_fn = lambda: funcckpt.create_selective_checkpoint_contexts([])
    with pytest.raises(OptionError, match="policy= or context_fn="):
        funcckpt.checkpoint(torch.sin, X, policy=policies.dots_saveable, context_fn=context_fn)
