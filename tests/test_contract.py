"""The contract of docs/contract.md, line by line, for `remat` and `checkpoint` alike.

Each case is a program of x and w that refers to w from some place, calls f, and then rebinds that place. Plain
autograd does not notice the rebinding, since the forward is over. So the same program without a checkpoint is
the reference, under every transform.
"""

import collections
import dataclasses
import functools
import random
import re
import threading
import types
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from compositions.stacks import stack
from support import WRAPS, assert_same, default_dtype, no_remat, outcome, registered
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vmap

from funcckpt import MutationError, checkpoint

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
    f = lambda x, w=w, *, k=2.0: (x @ w * k).sin()
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
def items_and_fields(w, x, wrap):
    items, data = [w, {"k": 2.0}], Data(w)
    f = lambda x: getattr(torch, data.name)(x @ items[0] * items[1]["k"]) @ data.w * data.k * len(items)
    y = wrap(f)(x)
    items[1]["k"], data.w, data.k, data.name = 5.0, w * 0, 5.0, "cos"
    items[:] = [w * 0, {"k": 3.0}, None]
    return y


@place
def argument_that_is_an_object(w, x, wrap):
    data = Data(w)
    y = wrap(lambda x, data: (x @ data.w * data.k).sin())(x, data)
    data.w, data.k = w * 0, 5.0
    return y


class Output(collections.OrderedDict):
    """As the outputs of transformers: each item is an attribute, too."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        super().__setitem__(name, value)


class OutputOfPackage(Output):
    __module__ = "pytest"  # any installed package


@place
def items_that_are_attributes(w, x, wrap):
    for cls in (Output, OutputOfPackage):
        out = cls()
        out.w, out.k = w, 2.0
        x = wrap(lambda x: ((x @ out.w * out["k"]).sin() @ out["w"] * out.k).sin())(x)  # noqa: B023
        out.w, out.k = w * 0, 5.0
    return x


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
def module_attributes(w, x, wrap):
    net = Block(w)
    net.register_buffer("b", w.cos())
    y = wrap(lambda x: net(x @ net.b))(x)
    net.w, net.b, net.k, net.act = w * 0, w * 0, 5.0, nn.Sigmoid()
    net.eval()
    return y


@place
def layers(w, x, wrap):
    """Where there were none, and in another order."""
    empty, net = nn.Sequential(), nn.Sequential(nn.Softplus(), nn.Sigmoid(), nn.Tanh())
    y = wrap(lambda x: net(empty(x @ w).sin()))(x)
    empty.append(nn.Sigmoid())
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


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f))], ids=["grad", "vmap(grad)"])
def test_what_f_does_not_use_keeps_no_history(transform, wrap):
    def loss(x):
        inner = x.exp()
        unused, ref = inner.sin(), weakref.ref(inner)  # which its node holds
        y = wrap(lambda x: (x * x, unused)[0])(x)
        inner = unused = None
        alive.append(ref() is not None)
        return y.sum()

    alive = []
    transform(loss)(inputs()[1])
    assert alive == [False]


def test_the_derivative_of_a_linear_function(wrap):
    """It may have a history where plain torch's has none, but nothing is differentiated by it."""
    x = inputs()[0].requires_grad_()
    (g,) = torch.autograd.grad(wrap(lambda x: x * 2)(x).sum(), x, create_graph=True)
    assert_same(g.detach(), torch.full_like(x, 2))
    second = torch.autograd.grad(g.sum(), x, allow_unused=True)[0] if g.requires_grad else None
    assert second is None or not second.any()


DICE, OWN, GENERATOR = random, random.Random(0), torch.Generator()
NUMPY, OLD = numpy.random.default_rng(0), numpy.random.RandomState(0)
DRAWS = {
    "torch": lambda x: x * torch.rand(3),
    "a generator": lambda x: x * torch.rand(3, generator=GENERATOR),
    "python": lambda x: x * random.random(),
    "python by another name": lambda x: x * DICE.gauss(0, 1),
    "numpy": lambda x: x * numpy.random.random(),
    "objects": lambda x: x * OWN.gauss(0, 1) * NUMPY.random() * OLD.rand(),
}


@pytest.mark.parametrize(
    "transforms", [s for s in STACKS if "vmap_x" not in s and "hessian_x" not in s], ids=".".join
)
@pytest.mark.parametrize("source", DRAWS)
def test_random_numbers(source, transforms, wrap):
    def program(wrap):
        GENERATOR.manual_seed(3)
        OWN.seed(0), OLD.seed(0)
        NUMPY.bit_generator.state = numpy.random.default_rng(0).bit_generator.state
        # The outputs, for a factor that is zero, would not tell.
        return lambda x, w: wrap(lambda x: (DRAWS[source](x) @ w).sin())(x - x.detach())

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
        (g,) = torch.autograd.grad(wrap(call if given else net)(x).sin().sum(), x)
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
    net = wrap(nn.BatchNorm1d(3))
    with pytest.raises(MutationError, match=r"perhaps to .*'num_batches_tracked'.*. Pass the buffers"):
        grad(lambda x: net(x).sum())(inputs()[1])


@pytest.mark.parametrize("transforms", STACKS, ids=".".join)
def test_a_counter_that_is_only_reachable(transforms, wrap):
    """No error, for f refers to it and does not read it."""

    class Shelf:
        calls = 0

    def helper(x):
        Shelf.calls += 1
        return x

    def program(wrap):
        def run(x, w):
            y = wrap(lambda x: helper(x) if x is None else (x @ w).sin())(x)
            helper(None)
            return y

        return run

    check(program, transforms, wrap)


@pytest.mark.parametrize("transform", ["backward", "vjp"])
@pytest.mark.parametrize("which", ["argument", "captured", "read last"])
def test_a_write_between_the_runs_is_an_error(which, transform, wrap):
    """Ours, or that of autograd where it has saved the tensor."""
    (x, w), v = inputs(), torch.ones(3)

    last = lambda v, x: x * v @ w
    f = lambda x: wrap(last if which == "read last" else lambda v, x: (x @ w * v).sin())(v, x)
    if transform == "vjp":
        _, pull = torch.func.vjp(f, x)
    else:
        pull = f(x.requires_grad_()).backward
    with torch.no_grad():
        (v if which == "argument" else w).mul_(2)
    with pytest.raises(RuntimeError) as error:
        pull(torch.ones(3))
    assert isinstance(error.value, MutationError) or "modified by an inplace operation" in str(error.value)


writes = lambda x: x.mul_(2).sin()
RUNS_ONCE = {
    "no_grad": lambda f, x: torch.no_grad()(f)(x.clone()),
    "vmap": lambda f, x: vmap(f)(x.clone()),
    "jvp": lambda f, x: jvp(lambda x: f(x.clone()), (x,), (x.cos(),)),
    "no input requires grad": lambda f, x: f(x.clone()),
}


@pytest.mark.parametrize("how", RUNS_ONCE)
def test_nothing_is_an_error_where_nothing_is_recomputed(how, wrap):
    x = inputs()[0]
    assert_same(RUNS_ONCE[how](wrap(writes), x), RUNS_ONCE[how](writes, x))


def test_a_buffer_that_is_updated_after_the_checkpoint(wrap):
    def run(wrap):
        torch.manual_seed(0)
        x, m = inputs()[1], nn.ModuleDict({"linear": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
        inner = lambda x: m["linear"](x).tanh() * m["norm"].running_mean.numel()
        y = wrap(lambda x: wrap(inner)(x).sin())(x)
        return torch.autograd.grad(m["norm"](y).mul(x).sum(), [*m["linear"].parameters()]), m.state_dict()

    assert_same(run(wrap), run(no_remat))


def test_a_gradient_inside_after_an_updated_buffer(wrap):
    def run(wrap):
        norm, x = nn.BatchNorm1d(3), inputs()[1].requires_grad_()

        def f(x):
            y = norm(x).sin() * norm.running_mean
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return g * norm(g).sin() * norm.running_mean

        y = wrap(f)(x)
        return y, torch.autograd.grad(y.mul(x).sum(), x), norm.state_dict()

    assert_same(run(wrap), run(no_remat))
    assert_same(run(lambda f: lambda x: checkpoint(f, x, early_stop=False)), run(no_remat))


def test_a_write_to_an_argument_under_grad_is_an_error(wrap):
    with pytest.raises((MutationError, RuntimeError)):
        grad(lambda x: wrap(writes)(x * 1).sum())(inputs()[0])


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
        first = True

        def forward(self, x):
            type(self).steps += 1
            vars(Net).get("first") and delattr(Net, "first")
            return (x * self.steps).sin()

    return Net(), lambda: (Net.steps, "first" in vars(Net))


def back_and_forth():
    """With two calls, each value is back before the backward."""
    box, local = types.SimpleNamespace(is_odd=False), threading.local()
    local.scale, local.first = 2.0, 1.0

    def f(x):
        box.is_odd, local.scale = not box.is_odd, getattr(local, "first", 1.0) / local.scale
        vars(local).pop("first", None)
        return (x * local.scale if box.is_odd else x.flip(0)).exp()

    return f, lambda: (vars(box), vars(local))


def items():
    """One is taken, one is added, and one is deleted."""
    skips, tables, box = [3.0, 2.0, 0.5], {}, types.SimpleNamespace(scale=2.0, more=3.0)

    def f(x):
        tables[len(tables)] = torch.arange(3).exp() * (len(tables) + 1)
        scale, box.scale = box.scale, 0.5
        if hasattr(box, "more"):
            del box.more
        return (x * skips.pop() * tables[len(tables) - 1]).tanh() * scale

    return f, lambda: (skips, tables, vars(box))


def module_of_python():
    """Reached as an object, and as the globals of its functions."""
    own = types.ModuleType("own")
    own.step, own.scale = 0, 0.5
    exec("def tick():\n global step\n step += 1\ndef scaled(x):\n return (x * step * scale).sin()", vars(own))

    def f(x):
        own.tick()
        own.scale *= 2
        return own.scaled(x) * own.step

    return f, lambda: (own.step, own.scale)


@pytest.mark.parametrize("transform", ["backward", "grad", "hessian"])
@pytest.mark.parametrize(
    "kind", [variables, attributes, class_attributes, back_and_forth, items, module_of_python]
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


def test_what_f_assigns_to_a_class_beside_a_differentiated_tensor(wrap):
    """During a run, the class has the tensors of the run."""

    def run(wrap):
        class Net:
            calls, first = 0, True

            @classmethod
            def apply(cls, x):
                cls.weight, cls.other = cls.other, cls.weight
                cls.calls += 1
                vars(cls).get("first") and delattr(cls, "first")
                return (x * cls.weight * cls.calls).sin()

        def loss(w):
            Net.weight, Net.other = w.exp(), w.cos()
            return (wrap(Net.apply)(w) * wrap(Net.apply)(w.cos())).sum()

        gradient = grad(loss)(inputs()[0])
        return gradient, Net.calls, "first" in vars(Net)

    assert_same(run(wrap), run(no_remat))


def test_what_f_stores_inside_of_others_is_there_in_the_next_call(wrap):
    """As a cache of cosines and sines, for each length."""

    def run(wrap):
        tables, own = {}, threading.local()

        def f(x):
            if not hasattr(own, "shift"):
                own.shift = torch.full((1,), 0.5)
            if len(x) not in tables:
                angles = torch.arange(3)
                tables[len(x)] = angles.cos(), [angles.sin()]
            cos, (sin,) = tables[len(x)]
            return x.tanh() * cos + x.flip(0) * sin + own.shift * x

        step = grad(lambda x: wrap(f)(wrap(f)(x)).sum())
        return [step(inputs()[0]) for _ in range(3)]

    assert_same(run(wrap), run(no_remat))


class Chooses(nn.Module):
    """Decides in its first call how it computes, as with a kernel that fits the input."""

    def __init__(self, choose):
        super().__init__()
        self.linear, self.scales = nn.Linear(3, 3, dtype=torch.float64), {"k": 2.0, "p": 3}
        self.choose, self.kernel = choose, None

    def scaled(self, x, power=1):
        return torch.tanh(self.linear(x)) * self.scales["k"] ** power

    def forward(self, x):
        if self.kernel is None:
            self.kernel = self.choose(self)
        if x.shape[-1] != 3:
            raise ValueError("another shape")
        return self.kernel(x)


class Head:
    def __init__(self, owner):
        self.owner = owner

    def __call__(self, x):
        return self.owner.scaled(x)


# What it stores then, which leads to itself.
CHOICES = {
    "method": lambda m: m.scaled,
    "function": lambda m: lambda x: m.scaled(x),
    "default": lambda m: lambda x, *, at=m: at.scaled(x),
    "partial": lambda m: functools.partial(m.scaled, power=2),
    "method in C": lambda m: functools.partial(lambda get, x: m.linear(x) * get("k"), m.scales.get),
    "decorated": lambda m: functools.wraps(m.scaled)(lambda x: m.scaled(x, 3)),
    "object": Head,
    "static": lambda m: staticmethod(m.scaled),
    "compiled": lambda m: torch.compile(m.linear, backend="eager"),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("fails", [False, True])
def test_what_f_makes_and_stores_leads_to_the_original(choice, fails, wrap):
    """In the next step as well, and after a call that has raised."""

    def run(wrap):
        torch.manual_seed(0)
        block = Chooses(CHOICES[choice])
        net = Calls(block, wrap)
        p = {name: x.detach() for name, x in net.named_parameters()}
        step = vmap(grad(lambda p, x: functional_call(net, p, (x,)).square().sum()), (None, 0))
        if fails:
            with pytest.raises(ValueError, match="another shape"):
                step(p, torch.ones(2, 4, dtype=torch.float64))
        gradients = []
        for _ in range(3):
            gradients.append(step(p, torch.stack(inputs()[:1])))
            p = {name: x * 0.5 for name, x in p.items()}
            block.scales["k"] += 1.0
        return gradients

    assert_same(run(wrap), run(no_remat))


@pytest.mark.parametrize("by_f", [False, True])
def test_an_attribute_that_a_partial_is_given(by_f, wrap):
    def run(wrap):
        h = functools.partial(torch.sin)

        def f(x):
            if by_f:
                h.calls = getattr(h, "calls", 0) + 1
            return (h(x) * getattr(h, "calls", 1)).exp()

        x = inputs()[0].requires_grad_()
        y = wrap(f)(x)
        if not by_f:
            h.calls = 5
        return torch.autograd.grad(y.sum(), x), h.calls

    assert_same(run(wrap), run(no_remat))


@pytest.mark.parametrize("kind", ["partial", "function", "tuple"])
def test_what_refers_to_itself_is_one_object(kind, wrap):
    def run(wrap):
        def handle(bus, k, x):
            return torch.sin(x * bus.gain * k)

        make = {
            "partial": lambda k: functools.partial(handle, bus, k),
            "function": lambda k: lambda x: handle(bus, k, x),
            "tuple": lambda k: (bus, k),
        }[kind]
        bus = types.SimpleNamespace(gain=1.0)
        bus.handlers = [make(1.0), make(3.0)]
        avoided = bus.handlers[1]  # found before the list

        def f(x):
            for h in bus.handlers:
                if h is not avoided:
                    x = handle(*h, x) if kind == "tuple" else h(x)
            return x

        x = inputs()[0].requires_grad_()
        y = wrap(f)(x)
        bus.gain = 5.0
        return torch.autograd.grad(y.sum(), x)

    assert_same(run(wrap), run(no_remat))


Pair = collections.namedtuple("Pair", "new old")
# What a function keeps of its last call, with the new value.
HISTORIES = {
    "tuple": lambda old, new: (*(old or ())[-1:], new),
    "dict": lambda old, new: {**(old or {}), len(old or {}): new},
    "deque": lambda old, new: collections.deque([*(old or ()), new], maxlen=2),
    "named tuple": Pair,
    "object": lambda old, new: types.SimpleNamespace(old=[old], new=new),
    "dataclass": lambda old, new: Data(new, old),
}


def total_of(x):
    if isinstance(x, torch.Tensor):
        return x.sum()
    parts = (
        x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list, collections.deque)) else ()
    )
    return sum(map(total_of, [*parts, *getattr(x, "__dict__", {}).values()]))


@pytest.mark.parametrize("kept", [torch.detach, lambda x: x], ids=["detached", "argument"])
@pytest.mark.parametrize("transforms", STACKS, ids=".".join)
@pytest.mark.parametrize("name", HISTORIES)
def test_a_history(name, transforms, kept, wrap):
    def program(wrap):
        def run(x, w):
            holder = types.SimpleNamespace(history=None)

            def f(x):
                holder.history = HISTORIES[name](holder.history, kept(x))
                return (x @ w).sin() * total_of(holder.history)

            f = wrap(f)
            return f(f(x)) * total_of(holder.history)

        return run

    check(program, transforms, wrap)


def test_the_page_names_tests_that_exist():
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(names) > 20
    for file, name in names:
        assert f"def {name}(" in (PAGE.parents[1] / file).read_text(), f"{file}::{name}"
