"""The contract of docs/contract.md, line by line, for `remat` and `checkpoint` alike.

Each case is a program of x and w that refers to w from some place, calls f, and then rebinds that place. Plain
autograd does not notice the rebinding, since the forward is over. So the same program without a checkpoint is
the reference, under every transform.
"""

import contextlib
import dataclasses
import functools
import importlib
import random
import re
import types
from pathlib import Path

import numpy
import pytest
import torch
from compositions.stacks import stack
from support import WRAPS, assert_same, default_dtype, no_remat, outcome, registered
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F

from funcckpt import MutationError

PAGE = Path(__file__).parents[1] / "docs" / "contract.md"
STACKS = [
    ("backward",),
    ("double_backward",),
    ("grad_both",),
    ("vmap_x", "grad_both"),
    ("hessian_x",),
    ("jvp_x",),
]


@pytest.fixture(autouse=True)
def in_float64(state_intact):
    with default_dtype(torch.float64):
        yield


@pytest.fixture(params=WRAPS)
def wrap(request):
    return WRAPS[request.param]


def inputs():
    generator = torch.Generator().manual_seed(7)
    return torch.rand(3, generator=generator), torch.randn(3, 3, generator=generator)


def check(program, transforms, wrap, ends=lambda: ()):
    """`program(wrap)(x, w)` under transforms is what it is without a checkpoint. So are the random streams."""
    runs = []
    for each in (no_remat, wrap):
        random.seed(0)
        numpy.random.seed(0)
        run = outcome(lambda each=each: stack(*transforms)(program(each))(*inputs()))
        if run.error is not None:
            raise run.error
        runs.append((run.value, run.rng, random.random(), numpy.random.random(), ends()))
    assert_same(runs[1], runs[0])


# ---------------------------------------------------------------- what f refers to


PLACES = {}
place = registered(PLACES)


GLOBAL = None


class Block(nn.Module):
    """Uses w and k, which stand in it, however they got there."""

    def __init__(self, w=None, k=2.0):
        super().__init__()
        self.w, self.k = w, k
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(x @ self.w * self.k) * (3.0 if self.training else 1.0)

    def method(self, x):
        return (x @ self.w).sin() * self.k


@dataclasses.dataclass
class Data:
    w: torch.Tensor
    k: float = 2.0
    name: str = "sin"


@place
def closure_variable(w, x, wrap):
    k = 2.0
    y = wrap(lambda x: (x @ w * k).sin())(x)
    w, k = w * 0, 5.0
    return y


@place
def loop_variable(w, x, wrap):
    for i in range(3):
        x = wrap(lambda x: (x @ w).sin() * (i + 1))(x)  # noqa: B023
    return x


@place
def default(w, x, wrap):
    def f(x, w=w, *, k=2.0):
        return (x @ w * k).sin()

    y = wrap(f)(x)
    f.__defaults__, f.__kwdefaults__ = (w * 0,), {"k": 5.0}
    return y


@place
def global_variable(w, x, wrap):
    global GLOBAL
    GLOBAL = w
    y = wrap(lambda x: (x @ GLOBAL).sin())(x)
    GLOBAL = None
    return y


@place
def partial(w, x, wrap):
    f = functools.partial(lambda x, w, k: (x @ w * k).sin(), w=w, k=2.0)
    y = wrap(f)(x)
    f.keywords.update(w=w * 0, k=5.0)
    return y


@place
def bound_object(w, x, wrap):
    block = types.SimpleNamespace(w=w, k=2.0)
    y = wrap(types.MethodType(Block.method, block))(x)
    block.w, block.k = w * 0, 5.0
    return y


@place
def list_item(w, x, wrap):
    items = [w, 2.0]
    y = wrap(lambda x: (x @ items[0] * items[1]).sin() * len(items))(x)
    items[:] = [w * 0, 5.0, None]
    return y


@place
def dict_item(w, x, wrap):
    items = {"w": w, "more": {"k": 2.0}}
    y = wrap(lambda x: (x @ items["w"]).sin() * items["more"]["k"])(x)
    items["w"], items["more"]["k"] = w * 0, 5.0
    return y


@place
def dataclass_field(w, x, wrap):
    data = Data(w)
    y = wrap(lambda x: getattr(torch, data.name)(x @ data.w * data.k))(x)
    data.w, data.k, data.name = w * 0, 5.0, "cos"
    return y


@place
def function_that_f_calls(w, x, wrap):
    g = lambda x: (x @ w).sin()
    y = wrap(lambda x: g(x) * 2)(x)
    g = torch.exp
    return y


@place
def module_parameter(w, x, wrap):
    net = Block(nn.Parameter(torch.zeros(3, 3)))
    y = functional_call(Calls(net, wrap), {"net.w": w}, (x,))
    net.w = nn.Parameter(torch.ones(3, 3))
    return y


class Calls(nn.Module):
    """Checkpoints a module that it holds, for functional_call."""

    def __init__(self, net, wrap):
        super().__init__()
        self.net, self.wrap = net, wrap

    def forward(self, x):
        return self.wrap(self.net)(x).sin()


@place
def module_buffer(w, x, wrap):
    net = nn.Module()
    net.register_buffer("b", w)
    y = wrap(lambda x: (x @ net.b).sin())(x)
    net.b = w * 0
    return y


@place
def module_attribute(w, x, wrap):
    net = Block(w)
    y = wrap(net)(x)
    net.w, net.k = w * 0, 5.0
    return y


@place
def training_flag(w, x, wrap):
    net = Block(w)
    y = wrap(net)(x)
    net.eval()
    return y


@place
def submodule(w, x, wrap):
    net = Block(w)
    y = wrap(net)(x)
    net.act = nn.Sigmoid()
    return y


@place
def submodules_where_there_were_none(w, x, wrap):
    net = nn.Sequential()
    y = wrap(lambda x: net(x @ w).sin())(x)
    net.append(nn.Sigmoid())
    return y


@place
def order_of_layers(w, x, wrap):
    net = nn.Sequential(nn.Softplus(), nn.Sigmoid(), nn.Tanh())
    y = wrap(lambda x: net(x @ w))(x)
    net._modules["3"] = net._modules.pop("0")
    return y


@place
def hooks_of_modules(w, x, wrap):
    net = nn.Sequential(Block(w), nn.Tanh())
    handle = net[1].register_forward_hook(lambda module, args, out: out * 2)
    net[0].register_forward_hook(lambda module, args, out: out.sin())
    y = wrap(net)(x)
    handle.remove()
    net[0].register_forward_hook(lambda module, args, out: out + 1, prepend=True)
    net[0].act.register_forward_pre_hook(lambda module, args: (args[0] * 5,))
    net[1].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    return y


@place
def attributes_and_methods_of_a_class(w, x, wrap):
    class Scaled(Block):
        scale = 2.0

        def method(self, x):
            return (x @ self.w * self.scale).sin()

        def forward(self, x):
            return self.method(x)

    first, second = Scaled(w), Scaled(w)
    y = wrap(second)(wrap(first)(x))
    first.scale, second.forward = 5.0, torch.exp
    Scaled.method = lambda self, x: x.exp()
    return y


@place
def list_that_gets_shorter(w, x, wrap):
    skips = [x.sin(), x.cos()]
    for _ in range(2):
        x = wrap(lambda x: (x @ w * skips[-1]).tanh())(x)
        skips.pop()
    return x


@place
def forward_of_an_instance(w, x, wrap):
    net = Block(w)
    before = net.forward
    net.forward = lambda x: before(x) * 2
    y = wrap(net)(x)
    net.forward = torch.exp
    return y


@pytest.mark.parametrize("transforms", STACKS, ids=".".join)
@pytest.mark.parametrize("name", PLACES)
def test_places_are_those_of_the_call(name, transforms, wrap):
    check(lambda wrap: lambda x, w: PLACES[name](w, x, wrap), transforms, wrap)


@pytest.mark.parametrize("transforms", STACKS, ids=".".join)
def test_arguments(transforms, wrap):
    """In any pytree; a list that was given is changed before the backward."""

    def program(wrap):
        def run(x, w):
            given = {"pair": (x, [w, "text"])}
            y = wrap(lambda tree, k=1.0: (tree["pair"][0] @ tree["pair"][1][0] * k).sin())(given, k=2.0)
            given["pair"][1][0] = None
            return y

        return run

    check(program, transforms, wrap)


def test_what_f_does_not_use_is_no_input(wrap):
    """A gradient with respect to parameters that functional_call has put in requires no grad."""
    net, x = nn.Linear(3, 3), inputs()[0]
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    g = grad(lambda p: wrap(lambda p: functional_call(net, p, (x,)).sin().sum())(p))(parameters)
    assert not any(leaf.requires_grad for leaf in g.values())


def test_what_f_does_not_use_is_no_input_at_a_level(wrap):
    """A tensor that is batched, and requires grad outside: the gradient does not hold its history."""
    c = inputs()[1]

    def sample(x):
        return grad(wrap(lambda p: (p * c).sum() if p.dim() else x))(c)

    assert not vmap(sample)(torch.rand(2, 3, requires_grad=True)).requires_grad


def test_the_derivative_of_a_linear_function(wrap):
    """It may have a history where plain torch's has none, but nothing is differentiated by it."""
    x = inputs()[0].requires_grad_()
    (g,) = torch.autograd.grad(wrap(lambda x: x * 2)(x).sum(), x, create_graph=True)
    assert_same(g.detach(), torch.full_like(x, 2))
    second = torch.autograd.grad(g.sum(), x, allow_unused=True)[0] if g.requires_grad else None
    assert second is None or not second.any()


class OwnLayerNorm(nn.LayerNorm):
    """Its eps is named in torch's code alone."""


def test_an_attribute_that_code_of_a_library_reads(wrap):
    def gradient(wrap):
        module, x = OwnLayerNorm(3), inputs()[1].requires_grad_()
        y = wrap(module)(x)
        module.eps = 3.0
        return torch.autograd.grad(y.sin().sum(), x)

    assert_same(gradient(wrap), gradient(no_remat))


def test_an_attribute_that_code_of_an_installed_package_reads(wrap, tmp_path, monkeypatch):
    path = tmp_path / "site-packages"
    path.mkdir()
    (path / "installed_base.py").write_text(
        "from torch import nn\n"
        "class Base(nn.Module):\n"
        "    k = 2.0\n"
        "    def forward(self, x):\n"
        "        return self.scaled(x).sin()\n"
        "    def scaled(self, x):\n"
        "        return x * self.k\n"
    )
    monkeypatch.syspath_prepend(path)
    kind = type("Own", (importlib.import_module("installed_base").Base,), {"__module__": __name__})

    def gradient(wrap):
        module, x = kind(), inputs()[1].requires_grad_()
        module.k = 2.0
        y = wrap(module)(x)
        module.k = 3.0
        return torch.autograd.grad(y.sum(), x)

    assert_same(gradient(wrap), gradient(no_remat))


# ---------------------------------------------------------------- the world


def from_torch(x):
    return x * torch.rand(3)


GENERATOR = torch.Generator()


def from_a_generator(x):
    return x * torch.rand(3, generator=GENERATOR)


def from_python(x):
    return x * random.random()


def from_numpy(x):
    return x * numpy.random.random()


DICE, OWN = random, random.Random(0)
NUMPY, OLD = numpy.random.default_rng(0), numpy.random.RandomState(0)


def by_another_name(x):
    return x * DICE.gauss(0, 1)


def from_objects(x):
    return x * OWN.gauss(0, 1) * NUMPY.random() * OLD.rand()


@pytest.mark.parametrize(
    "transforms", [s for s in STACKS if "vmap_x" not in s and "hessian_x" not in s], ids=".".join
)
@pytest.mark.parametrize(
    "draw", [from_torch, from_a_generator, from_python, from_numpy, by_another_name, from_objects]
)
def test_random_numbers(draw, transforms, wrap):
    def program(wrap):
        GENERATOR.manual_seed(3)
        OWN.seed(0), OLD.seed(0)
        NUMPY.bit_generator.state = numpy.random.default_rng(0).bit_generator.state
        # The outputs, for a factor that is zero, would not tell.
        return lambda x, w: wrap(lambda x: (draw(x) @ w).sin())(x - x.detach())

    ends = lambda: (torch.rand(3, generator=GENERATOR), OWN.random(), NUMPY.random(), OLD.rand())
    check(program, transforms, wrap, ends)


def test_batch_norm_is_updated_once(wrap):
    def run(wrap, given):
        net = nn.BatchNorm1d(3)
        x = inputs()[1].requires_grad_()
        state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        if given:
            state = {name: t.detach().clone() for name, t in state.items()}
        call = lambda x: functional_call(net, state, (x,))
        y = wrap(call if given else net)(x)
        (g,) = torch.autograd.grad(y.sin().sum(), x)
        return g, [state[name].detach() for name in ("running_mean", "num_batches_tracked")]

    for given in (False, True):
        assert_same(run(wrap, given), run(no_remat, given))


def test_batch_norm_under_a_transform(wrap):
    def run(wrap):
        net = nn.BatchNorm1d(3)
        p = {name: t.detach() for name, t in net.named_parameters()}
        buffers = {name: t.clone() for name, t in net.named_buffers()}
        x = inputs()[1]

        def loss(p, buffers):
            y = wrap(lambda p, x: functional_call(net, {**p, **buffers}, (x,)))(p, x)
            return y.sin().sum(), {name: b.detach() for name, b in buffers.items()}

        return grad(loss, has_aux=True)(p, buffers)

    assert_same(run(wrap), run(no_remat))


@pytest.mark.parametrize("what", ["autocast", "dtype", "device"])
def test_defaults_of_the_call(what, wrap):
    """Set around the forward, and not around the backward."""
    around = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "dtype": lambda: default_dtype(torch.float32),
        "device": lambda: torch.device("cpu"),
    }[what]

    def program(wrap):
        def run(x, w):
            with around():
                y = wrap(lambda x: (F.linear(x, w) * torch.full((3,), 0.1)).sin())(x)
            return y.double()

        return run

    other = torch.device("meta") if what == "device" else contextlib.nullcontext()
    x, w = (t.requires_grad_() for t in inputs())
    found = []
    for each in (no_remat, wrap):
        y = program(each)(x, w).sum()
        with other:
            found.append(torch.autograd.grad(y, (x, w)))
    assert_same(found[1], found[0])
    if what != "device":
        check(program, ("grad_both",), wrap)


# ---------------------------------------------------------------- what no copy can stand for


class Shelf:
    k = 2.0
    calls = 0


@pytest.mark.parametrize("transforms", STACKS, ids=".".join)
def test_a_counter_that_is_only_reachable(transforms, wrap):
    """No error, for f refers to it and does not read it."""

    def helper(x):
        Shelf.calls += 1
        return x

    def program(wrap):
        def run(x, w):
            f = lambda x: helper(x) if x is None else (x @ w).sin()
            y = wrap(f)(x)
            helper(None)
            return y

        return run

    check(program, transforms, wrap)


# ---------------------------------------------------------------- writes in place


@pytest.mark.parametrize("transform", ["backward", "vjp"])
@pytest.mark.parametrize("which", ["argument", "captured"])
def test_a_write_between_the_runs_is_an_error(which, transform, wrap):
    """Ours, or that of autograd where it has saved the tensor."""
    (x, w), v = inputs(), torch.ones(3)

    def f(x):
        return wrap(lambda v, x: (x @ w * v).sin())(v, x)

    if transform == "vjp":
        y, pull = torch.func.vjp(f, x)
    else:
        y = f(x.requires_grad_())
        pull = y.backward
    with torch.no_grad():
        (v if which == "argument" else w).mul_(2)
    with pytest.raises(RuntimeError) as error:
        pull(torch.ones(3))
    assert isinstance(error.value, MutationError) or "modified by an inplace operation" in str(error.value)


def writes(x):
    return x.mul_(2).sin()


@pytest.mark.parametrize("how", ["no_grad", "vmap", "jvp", "no input requires grad"])
def test_nothing_is_an_error_where_nothing_is_recomputed(how, wrap):
    x, _ = inputs()

    def run(wrap):
        f = wrap(writes)
        if how == "no_grad":
            with torch.no_grad():
                return f(x.clone())
        if how == "vmap":
            return vmap(f)(x.clone())
        if how == "jvp":
            return jvp(lambda x: f(x.clone()), (x,), (x.cos(),))
        return f(x.clone())

    assert_same(run(wrap), run(no_remat))


def test_a_write_to_an_argument_under_grad_is_an_error(wrap):
    with pytest.raises((MutationError, RuntimeError)):
        grad(lambda x: wrap(writes)(x * 1).sum())(inputs()[0])


# ---------------------------------------------------------------- the rest


def test_side_effects_happen_twice(wrap):
    prints = []

    def f(x):
        prints.append("now")
        return x.sin().cos()

    wrap(f)(inputs()[0].requires_grad_()).sum().backward()
    assert len(prints) == 2


def variables():
    calls, mean = 0, 1.0

    def f(x):
        nonlocal calls, mean
        calls, mean = calls + 1, mean / 2
        return (x * calls).sin() * mean

    return f, lambda: (calls, mean)


class Steps(nn.Module):
    steps, mean = 0, None

    def forward(self, x):
        self.steps += 1
        now = torch.full((), self.steps / 7)
        self.mean = now if self.mean is None else self.mean * 0.9 + now * 0.1
        return (x - self.mean).sin() * self.steps


def attributes():
    net = Steps()
    return net, lambda: (net.steps, net.mean)


def class_attributes():
    class Net(Steps):
        def forward(self, x):
            type(self).steps += 1
            return (x * self.steps).sin()

    return Net(), lambda: Net.steps


def stack_that_f_takes_from():
    skips = [3.0, 2.0, 0.5]
    return lambda x: (x * skips.pop()).tanh(), lambda: skips


def deleted():
    box = types.SimpleNamespace(scale=2.0, more=3.0)

    def f(x):
        out = (x * box.scale).sin()
        box.scale = box.more
        del box.more
        return out

    def g(x):
        return f(x) if hasattr(box, "more") else (x * box.scale).cos()

    return g, lambda: vars(box)


def cache():
    tables = {}

    def f(x):
        n = len(tables)
        if n not in tables:
            tables[n] = torch.arange(3).exp() * (n + 1)
        return (x * tables[n]).sin()

    return f, lambda: tables


@pytest.mark.parametrize("transform", ["backward", "grad", "hessian"])
@pytest.mark.parametrize(
    "kind", [variables, attributes, class_attributes, stack_that_f_takes_from, deleted, cache]
)
def test_what_f_assigns_it_assigns_once(kind, transform, wrap):
    def run(wrap):
        f, state = kind()
        x = inputs()[0]
        twice = lambda x: wrap(f)(wrap(f)(x)).sum()
        if transform == "backward":
            (gradient,) = torch.autograd.grad(twice(x.requires_grad_()), x)
        else:
            gradient = {"grad": grad, "hessian": hessian}[transform](twice)(x)
        return gradient, state()

    assert_same(run(wrap), run(no_remat))


def test_the_page_names_tests_that_exist():
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(names) > 20
    for file, name in names:
        assert f"def {name}(" in (PAGE.parents[1] / file).read_text(), f"{file}::{name}"
