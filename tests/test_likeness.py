"""A checkpointed function behaves like the function: what it does to its surroundings, and what its
surroundings do to it, is what it would be without remat, or an error. Each case was once a silently
wrong gradient.

A case is a function (wrap, x) that gives tensors that depend on x.
"""

import collections
import contextvars
import copy
import functools
import importlib
import pickle
import random
import sys
import threading
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import F64, assert_same, compare, plain, tensor, total
from support import WRAPS, registered
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from funcckpt import (
    ClosureError,
    EscapeError,
    MutationError,
    remat,
)


def _backward(f):
    x = tensor(3, requires_grad=True)
    out = f(x)
    total(out).backward()
    return out, x.grad


TRANSFORMS = {
    "backward": _backward,
    "grad": lambda f: grad(lambda x: total(f(x)))(tensor(3)),
    "vmap_grad": lambda f: vmap(grad(lambda x: total(f(x))))(tensor(2, 3)),
    "hessian": lambda f: hessian(lambda x: total(f(x)))(tensor(3)),
}
LIB = types.ModuleType("lib")


CASES = {}
case = registered(CASES)


# ---------------------------------------------------------------- what f changes


@case
def shares_a_variable(wrap, x):
    scale = 1.0

    def prepare():
        nonlocal scale
        scale = 3.0

    def f(x):
        prepare()
        return (x * scale).sin()

    return wrap(f)(x)


# ---------------------------------------------------------------- by what f could tell a copy


@case
def the_same_tensor_twice(wrap, x):
    return wrap(lambda q, k: (q * 2 if q is k else q).sin())(x, x)


@case
def attributes_of_tensors(wrap, x):
    w = x * 2
    w.mult = 3.0
    return wrap(lambda x: (x * w.mult).sin() * w)(x)


@case
def parameters_are_parameters(wrap, x):
    w = nn.Parameter(tensor(3, seed=2))
    w.register_hook(lambda g: None)  # what has hooks is replaced in a recomputation
    by_kind = lambda w, x: x.sin() * (w if isinstance(w, nn.Parameter) else 1.0)
    return wrap(lambda x: by_kind(w, x))(x), wrap(by_kind)(w, x)


@case
def a_named_tuple_that_changes_what_it_is_given(wrap, x):
    class Doubled(collections.namedtuple("Doubled", "a")):
        def __new__(cls, a):
            return super().__new__(cls, a * 2)

    pair = Doubled(x)
    return wrap(lambda x: (x * pair.a).sin())(x)


@case
def a_cached_method(wrap, x):
    class Block:
        def __init__(self):
            self.w = x.cos()

        @functools.cache  # noqa: B019
        def scale(self):
            return 2.0

        def __call__(self, x):
            return x.sin() * self.w * self.scale()

    out = wrap(Block())(x)
    assert Block.scale.cache_info().currsize <= 1
    return out


@case
def a_wrapped_library_function(wrap, x):
    global SCALE
    SCALE = 2.0
    out = wrap(functools.wraps(torch.sin)(lambda x: (x * SCALE).sin()))(x)
    SCALE = 7.0
    return out


# ---------------------------------------------------------------- what happens between


@case
def a_random_stream_put_back(wrap, x):
    def f(x):
        with torch.random.fork_rng(devices=[]):
            return F.dropout(x * 2).sin()

    torch.manual_seed(0)
    out = wrap(f)(x)
    torch.rand(3)
    return out


@case
def a_function_mode(wrap, x):
    class Cos(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))

    with Cos():
        return wrap(lambda x: torch.sin(x) * x)(x)


# ---------------------------------------------------------------- remat inside of remat


@case
def nested_with_a_tensor_of_a_module(wrap, x):
    LIB.w = x.cos()
    inner = wrap(lambda x: x.sin() * LIB.w)
    return wrap(lambda x: inner(x) * 2)(x)


@case
def nested_with_a_function_of_a_module(wrap, x):
    w = x.cos()
    LIB.scale = wrap(lambda x: x * w)
    return wrap(lambda x: LIB.scale(x.sin()))(x)


@case
def a_partial_with_an_attribute(wrap, x):
    w = x.cos()
    f = functools.partial(lambda a, x: x * a * w, 2.0)
    f.scale = 3.0
    return wrap(lambda x: f(x) * f.scale)(x)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
def test_like_the_function_itself(case, transform):
    def run(wrap):
        torch.manual_seed(1)
        return TRANSFORMS[transform](functools.partial(CASES[case], wrap))

    compare(run, remat)


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
def test_an_argument_that_f_changes(transform):
    def pops(x, skips):
        return x * skips.pop()

    def writes(x, aux):
        aux["n"] = 1
        return x.sin()

    for f, make in ((pops, lambda x: [x.sin(), x.cos()]), (writes, dict.fromkeys)):
        with pytest.raises(MutationError, match="list or dict"):
            TRANSFORMS[transform](
                lambda x, f=f, make=make: remat(f)(x, make([x]) if f is writes else make(x))
            )


ALIASES = {
    "view": lambda y: (y, y[:2]),
    "two_views": lambda y: (y[:2], y[1:]),
    "detached": lambda y: (y, y.detach()),
}


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
@pytest.mark.parametrize("alias", ALIASES)
def test_writing_to_outputs_that_share_memory(alias, transform):
    def run(wrap):
        def f(x):
            a, b = wrap(lambda x: ALIASES[alias](x.sin()))(x)
            a.mul_(3)
            return a.square().sum() + b.square().sum()

        return TRANSFORMS[transform](f)

    with pytest.raises(RuntimeError, match=r"modified (by an )?in-?place"):
        run(remat)


@pytest.mark.parametrize("transform", ["grad", "vmap_grad"])
def test_writing_to_an_output_that_is_the_input(transform):
    def run(wrap):
        def f(x):
            x = x * 1
            y, same = wrap(lambda x: (x.sin(), x))(x)
            same.add_(1)
            return y * x

        return TRANSFORMS[transform](f)

    compare(run, remat, allowed=(RuntimeError,))


def test_an_output_that_is_the_input_is_the_input():
    x, w = tensor(3, requires_grad=True), tensor(3, requires_grad=True)
    y, same, captured, twice = remat(lambda x: ((y := x * w), x, w, y))(x)
    assert same is x and captured is w and twice is y


# ---------------------------------------------------------------- copies of the checkpointed function


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=F64)
        self.block = remat(self._block)

    def _block(self, x):
        return self.linear(x).sin()

    def forward(self, x):
        return self.block(x)

    @remat
    def decorated(self, x):
        return self.linear(x).sin()


@remat(determinism_check="values")
def decorated(x):
    """Sine."""
    return x.sin()


def test_a_copy_of_a_model_has_its_own_parameters():
    model = Model()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.linear.weight.zero_()
    x = tensor(3)
    assert_same(other(x), other.linear.bias.sin())
    assert_same(other.decorated(x), other.linear.bias.sin())
    other(x).sum().backward()
    assert model.linear.weight.grad is None and other.linear.weight.grad is not None


def test_pickle():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated
    f = pickle.loads(pickle.dumps(remat(torch.sin)))
    assert_same(_backward(f), _backward(torch.sin))
    model = pickle.loads(pickle.dumps(Model()))
    model(tensor(3)).sum().backward()
    assert model.linear.weight.grad is not None


# ---------------------------------------------------------------- and nothing more than needed


def test_assigned_before_it_failed():
    def run(wrap):
        box = types.SimpleNamespace(w=None, failed=False)

        def f(x):
            box.failed = True
            raise ValueError(box.w)

        def loss(x):
            box.w = x
            with pytest.raises(ValueError):
                wrap(f)(x)
            return x.sum()

        grad(loss)(tensor(3))
        return box.failed

    assert run(remat) is run(plain) is True


# ---------------------------------------------------------------- leaves, hooks, compiled and lazy modules


def test_a_leaf_that_somebody_else_holds():
    held = []

    def f(x):
        held.append(torch.ones(3, dtype=F64, requires_grad=True))
        return (x * held[-1]).sin()

    with pytest.raises((ClosureError, EscapeError)):
        remat(f)(tensor(3, requires_grad=True))


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(Plain(), backend="eager")

    def forward(self, x):
        return self.inner(x).cos()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(tensor(3, seed=4))

    def forward(self, x):
        return (x * self.w).sin()


def test_compiled_modules_are_recomputed_as_they_were_written():
    def run(wrap, module):
        x = tensor(3, requires_grad=True)
        wrap(module)(x).sum().backward()
        return x.grad, *[p.grad for p in module.parameters()]

    for make in (Compiled, lambda: torch.compile(Plain(), backend="eager")):
        assert_same(run(remat, make()), run(plain, make()))


# ---------------------------------------------------------------- random numbers that are not torch's


PACKAGE = """
import random
import numpy as np
from torch import nn

def draw():
    return random.gauss(0, 1) + np.random.randn()

class Noisy(nn.Module):
    def forward(self, x):
        return x * random.random() + x * np.random.standard_normal()
"""


def _imports_in_its_first_call(x):
    import noisy_package

    return x * noisy_package.draw()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("by", ["function", "module", "own_module", "import"])
def test_random_numbers_that_an_installed_package_draws(by, transform, tmp_path, monkeypatch):
    path = tmp_path / "site-packages"
    path.mkdir()
    (path / "noisy_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(path)
    package = importlib.import_module("noisy_package")
    monkeypatch.setitem(sys.modules, "noisy_package", package)

    class Own(package.Noisy):
        def forward(self, x):
            return super().forward(x).cos()

    make = {
        "function": lambda: lambda x: x * package.draw(),
        "module": lambda module=package.Noisy(): lambda x: module(x),
        "own_module": lambda module=Own(): lambda x: module(x),
        "import": lambda: _imports_in_its_first_call,
    }[by]

    def run(wrap):
        random.seed(0)
        np.random.seed(0)
        np.random.randn()  # half of a pair: the next number moves no counter
        if by == "import":
            sys.modules.pop("noisy_package")
        f = wrap(make())
        # The outputs, all zero, would not tell.
        found = TRANSFORMS[transform](lambda x: f(f(x - x.detach())) + x.sin())
        return found, random.random(), np.random.rand()

    (found, *stream), (expected, *expected_stream) = run(remat), run(plain)
    assert_same(found, expected)
    assert stream == expected_stream


# ---------------------------------------------------------------- writes that no version counter sees


def test_an_embedding_with_a_largest_norm():
    table = nn.Embedding(3, 3, max_norm=0.5, dtype=F64)
    f = remat(lambda i, x: table(i).sin() * x)
    with pytest.raises(MutationError, match="parameter 'weight'"):
        f(torch.tensor([1, 2]), tensor(2, 3, requires_grad=True))


# ---------------------------------------------------------------- what is made by each forward

_hooked = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")


@_hooked
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune"])
def test_weights_that_hooks_compute(kind, transform):
    def run(wrap):
        torch.manual_seed(0)
        module = nn.Linear(3, 3, dtype=F64)
        if kind == "prune":
            prune.l1_unstructured(module, "weight", 0.5)
        else:
            getattr(nn.utils, kind)(module.eval() if kind == "spectral_norm" else module)
        return TRANSFORMS[transform](lambda x: wrap(module)(x).sin()), [p.grad for p in module.parameters()]

    assert_same(run(remat), run(plain))


def test_a_cached_property_of_a_parameter():
    class Symmetric(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(tensor(3, 3, seed=1))

        @functools.cached_property
        def symmetric(self):
            return self.w + self.w.T

        def forward(self, x):
            return x @ self.symmetric

    with pytest.raises(EscapeError, match="attribute 'symmetric'"):
        remat(Symmetric())(tensor(3, requires_grad=True))


# ---------------------------------------------------------------- another thread, another time

variable = contextvars.ContextVar("variable")


def test_backward_in_another_thread():
    """As the backward of each accelerator is."""

    def run(wrap):
        variable.set(2.0)
        x = tensor(3, requires_grad=True)
        loss = wrap(lambda x: (x * variable.get()).sin())(x).sum()
        variable.set(3.0)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert variable.get() == 3.0
        return x.grad

    assert_same(run(remat), run(plain))


# ---------------------------------------------------------------- further


def test_an_argument_made_to_require_grad():
    """Forces, as machine-learned potentials compute them."""

    def run(wrap):
        w = tensor(3, 4, seed=1, requires_grad=True)

        def f(position):
            position.requires_grad_(True)
            energy = (position @ w).tanh().sum()
            return energy, torch.autograd.grad(energy, position, create_graph=True)[0]

        position = tensor(5, 3)
        energy, forces = wrap(f)(position)
        (energy + forces.pow(2).sum()).backward()
        return w.grad, position.grad

    assert_same(run(remat), run(plain))


class Halved(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            args = (args[0], args[1] * 0.5, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


class OfHalved(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(tensor(3, 3, seed=1).as_subclass(Halved))

    def forward(self, x):
        return F.linear(x, self.w).sin() * (2 if isinstance(self.w, Halved) else 3)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_subclass_that_says_what_operators_do(wrap):
    """Also below its own backward, where it has no say any more."""

    def run(wrap):
        module, x = OfHalved(), tensor(3, requires_grad=True)
        wrap(module)(x).sum().backward()
        gradient = grad(lambda x: wrap(module)(x).as_subclass(torch.Tensor).sum())(tensor(3))
        return x.grad, module.w.grad.as_subclass(torch.Tensor), gradient

    assert_same(run(WRAPS[wrap]), run(plain))


class WithHooks(nn.Module):
    """A module that removes its hooks when it goes."""

    def __init__(self):
        super().__init__()
        self.w, self.act = nn.Parameter(tensor(3, 3, seed=1)), nn.Tanh()
        self.handle = self.act.register_forward_hook(lambda module, inputs, output: 2 * output)

    def forward(self, x):
        return self.act(x @ self.w)

    def __del__(self):
        self.handle.remove()


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
def test_a_module_that_would_notice_a_copy(transform):
    def run(wrap):
        module = WithHooks()
        f = lambda x: wrap(module)(wrap(module)(x))
        return TRANSFORMS[transform](f), TRANSFORMS[transform](f), [p.grad for p in module.parameters()]

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("what", ["parameter", "variable", "computed variable", "argument"])
def test_backward_inside(what, wrap):
    module, w = nn.Linear(3, 3, dtype=F64), tensor(3, requires_grad=True)
    doubled = w * 2
    parts = {"parameter": lambda x: module(x.detach()), "variable": lambda x: w.exp(), "argument": torch.exp}
    parts["computed variable"] = lambda x: doubled.exp()

    def f(x):
        parts[what](x).sin().sum().backward()
        return x.sin()

    with pytest.raises(MutationError, match=r"calls backward.*torch\.autograd\.grad"):
        WRAPS[wrap](f)(tensor(2, 3, requires_grad=True))
    if what == "argument":
        with pytest.raises(MutationError, match=r"calls backward.*torch\.autograd\.grad"):
            WRAPS[wrap](f)(tensor(2, 3, requires_grad=True) * 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_operators_counted_by_torch(transform):
    """Its module tracker puts hooks on the inputs of each module; torch has none for a leaf under grad."""

    def run(wrap):
        module = nn.Linear(3, 3, dtype=F64)
        with torch.no_grad():
            module.weight.copy_(tensor(3, 3, seed=1))
            module.bias.copy_(tensor(3, seed=2))
        with FlopCounterMode(display=False) as counter:
            found = TRANSFORMS[transform](lambda x: wrap(lambda x: module(x).sin())(x.cos()))
        return (found, module.weight.grad), counter.get_total_flops()

    (found, flops), (expected, expected_flops) = run(remat), run(plain)
    assert_same(found, expected)
    assert flops > expected_flops


class Methods:
    w = 2.0

    @remat
    @staticmethod
    def static(x):
        return (x * 2).sin()

    @remat
    @classmethod
    def of_class(cls, x):
        return (x * cls.w).sin()


@pytest.mark.parametrize("method", [Methods.static, Methods().static, Methods.of_class, Methods().of_class])
def test_static_methods_and_those_of_classes(method):
    assert_same(_backward(method), _backward(lambda x: (x * 2).sin()))


# ---------------------------------------------------------------- tensors that only a mode can replace


@pytest.mark.parametrize("inner", [lambda x, v: x * v, lambda x, v: x.sin() + (v * x).detach()])
def test_nested_remats_of_a_tensor_that_a_mode_replaces(inner):
    def run(wrap):
        def loss(w, x):
            class Holder:
                v = w

            f = wrap(lambda x: inner(x, Holder.v))
            return wrap(lambda x: f(x).cos())(x).sum()

        twice = lambda i: jacrev(jacrev(loss, i), i)(tensor(3), tensor(3, seed=1))
        return twice(0), twice(1)

    compare(run, remat)


# ---------------------------------------------------------------- what f asks of its tensors


def test_a_hook_that_refers_to_its_tensor():
    def f(x):
        h = x.sin()
        h.register_hook(lambda g: g * h.detach())
        return h.cos()

    compare(lambda wrap: _backward(wrap(f)), remat)


# ---------------------------------------------------------------- what changes unseen


def test_an_optimizer_in_the_backward():
    """It changes parameters that later recomputations can reach, and do not use."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Linear(3, 3, dtype=F64) for _ in range(3)])

        def block(self, x, i):
            return self.blocks[i](x).tanh()

    def run(wrap):
        model, x = Blocks(), tensor(3, requires_grad=True)
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], 0.1)
            p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        y = x
        for i in range(3):
            y = wrap(model.block)(y, i)
        y.sum().backward()
        return x.grad, list(model.parameters())

    compare(run, remat)


def test_a_parameter_that_is_used_without_its_gradient_and_changed():
    w = tensor(3, seed=1, requires_grad=True)
    loss = remat(lambda x: (x * w.detach()).sin())(tensor(3, requires_grad=True)).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(MutationError, match=r"'w'.*changed in place"):
        loss.backward()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_functional_call_in_a_graph(mode):
    """The module has parameters of its own, which fake tensors do not mix with."""
    module = nn.Linear(3, 3, dtype=F64)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def step(wrap):
        def loss(parameters, x):
            return wrap(lambda p, x: functional_call(module, p, (x,)).sin())(parameters, x).sum()

        return grad(loss)

    graph = make_fx(step(remat), tracing_mode=mode)(parameters, tensor(2, 3))
    x = tensor(2, 3, seed=1)
    assert_same(graph(parameters, x), step(plain)(parameters, x))
