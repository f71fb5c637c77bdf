"""Any pytree in, any pytree out: `remat(f)` gives and takes what f gives and takes, under every transform."""

import inspect
import types
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch
from oracles import OBSERVATIONS, assert_same, observe, plain, tensor
from support import WRAPS
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from funcckpt import MutationError, remat

Point = namedtuple("Point", "x y")
Mode = Enum("Mode", "UP DOWN")


@dataclass
class Body:
    mass: torch.Tensor
    at: Point
    name: str


pytree.register_dataclass(Body)


class WithArray:
    """Its array in the structure is neither equal to another one nor not."""

    def __init__(self, x, extra):
        self.x, self.extra = x, extra


class Extra:
    """Made anew whenever the class below is flattened, and equal to itself alone."""

    def __init__(self, extra):
        self.extra = extra


class WithObject(WithArray):
    pass


pytree.register_pytree_node(WithArray, lambda a: ([a.x], a.extra), lambda xs, extra: WithArray(*xs, extra))
pytree.register_pytree_node(
    WithObject, lambda a: ([a.x], Extra(a.extra)), lambda xs, extra: WithObject(*xs, extra.extra)
)


def positional(x, y):
    return torch.sin(x) * y


def parameters(x, *rest, scale, **more):
    for r in rest:
        x = torch.tanh(x * r)
    return x * scale + more["bias"]


def dataclasses_(body):
    return Body(body.mass * body.at.x.sum(), Point(body.at.y.sin(), body.at.x * body.mass), body.name + "!")


def collections_(x):
    d = defaultdict(list)
    d["a"].append(x.sin())
    return OrderedDict(one=x * 2, two=deque([x.cos(), x], maxlen=3)), d


def leaves_in(x, power, name, flag, nothing, mode, dtype, function, size):
    assert (name, flag, nothing, mode, dtype) == ("n", True, None, Mode.UP, torch.float64)
    return function(x.reshape(size)) ** power


def leaves_out(x):
    others = {"n": None, "dtype": x.dtype, "shape": tuple(x.shape)}
    return x.sin(), None, 3, True, "text", 2.5, Mode.DOWN, (), others


def case(f, *args, **kwargs):
    return f, args, kwargs


x3, y3 = tensor(3), tensor(3, seed=1)
pair = Point(tensor(2), tensor(2, seed=1))
CASES = {
    "parameters": case(parameters, x3, y3, 2.0, bias=tensor(), scale=tensor(3, seed=2)),
    "dataclasses": case(dataclasses_, Body(tensor(), pair, "sun")),
    "collections": case(collections_, x3),
    "leaves_in": case(
        leaves_in, tensor(2, 3), 2, "n", True, None, Mode.UP, torch.float64, torch.cos, torch.Size([3, 2])
    ),
    "leaves_out": case(leaves_out, x3),
    "inputs_among_outputs": case(lambda x, n: (n, x, x * n), x3, torch.arange(3)),
    "no_output": case(lambda x: None, x3),
    "strided": case(
        lambda x: (x.t() * 2, x.sin().transpose(0, 1), (x * 1).expand(2, *x.shape)), tensor(4, 3).t()
    ),
    "expanded_parameter": case(positional, torch.nn.Parameter(x3).expand(2, 3), torch.nn.Parameter(y3)),
}


@pytest.mark.parametrize("transform", OBSERVATIONS)
@pytest.mark.parametrize("case", CASES)
def test_same_as_plain(case, transform):
    f, args, kwargs = CASES[case]
    assert_same(observe(transform, remat(f), args, kwargs), observe(transform, f, args, kwargs))


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_of_the_same_kind_and_place(case):
    """Types of the containers too, which a pytree comparison may see as equal; strides as in the plain call."""
    f, args, kwargs = CASES[case]
    got, want = remat(f)(*args, **kwargs), f(*args, **kwargs)
    assert type(got) is type(want)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want)):
        assert type(g) is type(w)
        if isinstance(w, torch.Tensor):
            assert g.stride() == w.stride()
            assert g.requires_grad == w.requires_grad


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_one_tensor_as_several_arguments(wrap):
    def run(wrap):
        x = tensor(2, 3, requires_grad=True)
        f = wrap(lambda x, y, d, row, flat: (x * y * d["x"] * row).sum() + flat.sin().sum() * (1 + (x is y)))
        f(x, x, {"x": x}, x[0], x.view(-1)).backward()
        return x.grad, grad(lambda x: wrap(positional)(x, x).sum())(x.detach())

    assert_same(run(wrap), run(plain))


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": ("config",)}], ids=str)
def test_what_is_no_tensor_is_static(options):
    """As the options of JAX ask for it, with them and without."""
    seen = []

    def f(x, config):
        seen.append(config)
        return x * config.scale if config.name == "a" else x

    config = types.SimpleNamespace(scale=2.0, name="a")
    for g in (remat(f), remat(f, **options)):
        for transform in ("backward", "vmap_grad"):
            seen.clear()
            found = observe(transform, lambda x, g=g: g(x, config).sum(), (tensor(3),))
            assert len(seen) == 2 and all(s is config for s in seen)
            assert_same(found, observe(transform, lambda x: f(x, config).sum(), (tensor(3),)))


def test_keeps_name_doc_and_signature():
    def f(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        """Scales."""
        return x * scale

    for g in (remat(f), remat()(f), remat(f, determinism_check="none", preserve_rng_state=False)):
        assert g.__name__ == "f" and g.__doc__ == "Scales." and g.__wrapped__ is f
        assert inspect.signature(g) == inspect.signature(f)
        assert_same(grad(lambda x, g=g: g(x, scale=3.0).sum())(tensor(3)), torch.full_like(tensor(3), 3.0))


def test_wrong_arguments_raise_what_f_raises():
    for arguments in ((), (1, 2, 3)):
        with pytest.raises(TypeError, match="positional") as want:
            positional(*arguments)
        with pytest.raises(TypeError) as got:
            remat(positional)(*arguments)
        assert str(want.value) in str(got.value)


def test_a_changed_context_is_an_error():
    def f(a):
        a.extra = Mode.UP
        return a.x.sin()

    with pytest.raises(MutationError, match="among its arguments"):
        remat(f)(WithArray(tensor(3, requires_grad=True), Mode.DOWN))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("cls", [WithArray, WithObject])
def test_structures_with_what_cannot_be_compared(cls, wrap):
    def gradient(wrap):
        f = wrap(lambda a: (a.x.sin(), cls(a.x.cos(), a.extra + 1)))

        def total(x):
            y, b = f(cls(x, np.ones(2)))
            return (y.exp() + b.x).sum()

        x = x3.clone().requires_grad_()
        return grad(total)(x3), torch.autograd.grad(total(x), x)

    assert_same(gradient(WRAPS[wrap]), gradient(lambda f: f))


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_shape_stays_a_shape(wrap):
    w, x = tensor(3, 3, seed=1), tensor(2, 3)

    def loss(wrap, w):
        mean, (size,) = wrap(lambda x, w: ((x @ w).tanh().mean(0), [x.shape]))(x, w)
        return wrap(lambda mean, size, w: (mean.expand(size) @ w).tanh() / size.numel())(mean, size, w).sum()

    def gradients(wrap):
        leaf = w.clone().requires_grad_()
        return torch.autograd.grad(loss(wrap, leaf), leaf), grad(lambda w: loss(wrap, w))(w)

    assert_same(gradients(WRAPS[wrap]), gradients(lambda f: f))


@pytest.mark.parametrize("captures", [False, True])
def test_a_size_without_a_number(captures):
    def loss(x, wrap):
        n = x.shape[0] * x.shape[1]
        g = wrap((lambda x: x.sin().view(n)) if captures else (lambda x, n: x.sin().view(n)))
        return g(*((x,) if captures else (x, n))).square().sum()

    run = lambda wrap: make_fx(grad(lambda x: loss(x, wrap)), tracing_mode="symbolic")(tensor(3, 4))(
        tensor(2, 5)
    )
    assert_same(run(remat), run(lambda f: f))
