"""Any pytree in, any pytree out: `remat(f)` gives and takes what f gives and takes, under every
transform.
"""

import inspect
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum

import pytest
import torch
from oracles import OBSERVATIONS, assert_same, observe, plain, tensor
from support import WRAPS, registered
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

from funcckpt import FuncckptError, InputError, remat

Point = namedtuple("Point", "x y")
Mode = Enum("Mode", "UP DOWN")


@dataclass
class Body:
    mass: torch.Tensor
    at: Point
    name: str


pytree.register_dataclass(Body)


class Stack:
    """A registered node with a context."""

    def __init__(self, items, label):
        self.items, self.label = items, label


pytree.register_pytree_node(
    Stack,
    lambda s: (list(s.items), s.label),
    lambda items, label: Stack(list(items), label),
    serialized_type_name="funcckpt.tests.Stack",
)


# ---------------------------------------------------------------- functions of many shapes


def positional(x, y):
    return torch.sin(x) * y


def variadic(x, *rest, **more):
    for r in rest:
        x = torch.tanh(x * r)
    return x * more["gain"] + more.get("bias", 0.0)


def nested(tree):
    (a, [b, c]), d = tree["in"], tree["more"]
    return [(a * b, {"k": [c.sin() * d]}), ()]


def dataclasses_(body):
    return Body(body.mass * body.at.x.sum(), Point(body.at.y.sin(), body.at.x * body.mass), body.name + "!")


def collections_(x):
    d = defaultdict(list)
    d["a"].append(x.sin())
    return OrderedDict(one=x * 2, two=deque([x.cos(), x], maxlen=3)), d


def leaves_in(x, power, name, flag, nothing, mode, dtype, function):
    assert (name, flag, nothing, mode, dtype) == ("n", True, None, Mode.UP, torch.float64)
    return function(x) ** power


def leaves_out(x):
    others = {"n": None, "dtype": x.dtype, "shape": tuple(x.shape)}
    return x.sin(), None, 3, True, "text", 2.5, Mode.DOWN, (), others


def views_of_output(x):
    y = x.exp()
    return y, y[0], y.view(-1), y.t().sin()


def case(f, *args, **kwargs):
    return f, args, kwargs


x3, y3 = tensor(3), tensor(3, seed=1)
pair = Point(tensor(2), tensor(2, seed=1))
CASES = {
    "positional": case(positional, x3, y3),
    "broadcast": case(positional, tensor(3, 1), tensor(1, 2, seed=1)),
    "keywords": case(positional, y=x3, x=y3),
    "keyword_only": case(lambda x, *, scale, shift=0.5: torch.sin(x * scale) + shift, x3, scale=y3),
    "variadic": case(variadic, x3, y3, 2.0, gain=tensor(3, seed=2), bias=tensor()),
    "dicts": case(
        lambda d: {"out": torch.exp(d["a"]) * d["b"]["c"], "again": d["a"].cos()}, {"b": {"c": x3}, "a": y3}
    ),
    "nested": case(nested, {"in": (tensor(2), [tensor(2, seed=1), tensor(2, seed=2)]), "more": 3.0}),
    "namedtuples": case(lambda p: Point(p.y.sin() * p.x, Point(p.x.cos(), p.y)), Point(x3, y3)),
    "dataclasses": case(dataclasses_, Body(tensor(), pair, "sun")),
    "custom_node": case(
        lambda stack: Stack([i.sin() for i in stack.items], stack.label + "'"),
        Stack([tensor(2), tensor(3)], "label"),
    ),
    "collections": case(collections_, x3),
    "leaves_in": case(leaves_in, x3, 2, "n", True, None, Mode.UP, torch.float64, torch.cos),
    "leaves_out": case(leaves_out, x3),
    "complexes": case(
        lambda z: (torch.exp(z) * z.conj(), z.real.sin(), z.abs(), torch.complex(z.imag, z.real)),
        tensor(3, dtype=torch.complex128),
    ),
    "input_among_outputs": case(lambda x, y: (x, x * y, y), x3, y3),
    "identity_of_integers": case(lambda x, n: (n, x), x3, torch.arange(3)),
    "views_of_output": case(views_of_output, tensor(2, 2)),
    "no_output": case(lambda x: None, x3),
    "strided": case(
        lambda x: (x.t() * 2, x.sin().transpose(0, 1), (x * 1).expand(2, *x.shape)), tensor(4, 3).t()
    ),
    "expanded_input": case(positional, x3.expand(2, 3), y3),
    "size_in": case(
        lambda x, size, device: x.reshape(size).to(device).sin(),
        *(tensor(2, 3), torch.Size([3, 2]), torch.device("cpu")),
    ),
    "parameter": case(positional, torch.nn.Parameter(x3), y3),
}


@pytest.mark.parametrize("transform", OBSERVATIONS)
@pytest.mark.parametrize("case", CASES)
def test_same_as_plain(case, transform):
    f, args, kwargs = CASES[case]
    assert_same(observe(transform, remat(f), args, kwargs), observe(transform, f, args, kwargs))


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_of_the_same_kind_and_place(case):
    """Types of the containers too, which a pytree comparison may see as equal; strides as in the
    plain call.
    """
    f, args, kwargs = CASES[case]
    got, want = remat(f)(*args, **kwargs), f(*args, **kwargs)
    assert type(got) is type(want)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(want)):
        assert type(g) is type(w)
        if isinstance(w, torch.Tensor):
            assert g.stride() == w.stride()
            assert g.requires_grad == w.requires_grad


# ---------------------------------------------------------------- gradients that are None


PROGRAMS = {}
program = registered(PROGRAMS)


@program
def unused_output_under_transforms(wrap):
    f = wrap(lambda x, y: (x.sin() * y, x.exp(), y.long()))
    loss = lambda x, y: f(x, y)[1].sum()
    x, y = tensor(3), tensor(3, seed=1)
    return (
        grad(loss, argnums=(0, 1))(x, y),
        vmap(grad(loss, argnums=(0, 1)))(x[:, None], y[:, None]),
        jvp(loss, (x, y), (x, y)),
    )


def test_no_gradient_wanted_no_graph():
    out = remat(positional)(tensor(3), tensor(3, seed=1))
    assert not out.requires_grad and out.grad_fn is None
    with torch.no_grad():
        assert not remat(positional)(tensor(3, requires_grad=True), tensor(3)).requires_grad
    assert not any(
        o.requires_grad for o in remat(lambda x: (x > 0, x.argmax()))(tensor(3, requires_grad=True))
    )


# ---------------------------------------------------------------- the same tensor in two places,
# in place afterwards


@pytest.mark.parametrize("wrap", [plain, remat], ids=["plain", "remat"])
def test_one_tensor_as_two_arguments(wrap):
    x = tensor(3, requires_grad=True)
    wrap(lambda x, y, d: x * y * d["x"])(x, x, {"x": x}).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)
    torch.testing.assert_close(
        grad(lambda x: wrap(positional)(x, x).sum())(x.detach()), (x.sin() + x * x.cos()).detach()
    )


@program
def argument_and_its_view(wrap):
    x = tensor(2, 3, requires_grad=True)
    wrap(lambda x, row, flat: (x * row).sum() + flat.sin().sum())(x, x[0], x.view(-1)).backward()
    return x.grad


@program
def output_that_only_one_argument_batches_may_be_written_to(wrap):
    """No expanded output where the plain function gives a real one."""
    f = wrap(lambda x, c: (x.sin(), x + 0 * c))

    def g(x, c):
        y, z = f(x, c)
        return y + 1, z.add_(c)

    return vmap(g, (None, 0))(tensor(3), tensor(2, 3, seed=1))


# ---------------------------------------------------------------- pytrees through vmap's and
# grad's own arguments


def test_vmap_over_a_pytree_with_in_dims_and_out_dims():
    f = lambda p, d: {"a": p.x.sin() * d["w"], "b": (p.y.cos(), d["w"])}
    p, d = Point(tensor(2, 3), tensor(3, 2, seed=1)), {"w": tensor(3, seed=2)}
    in_dims, out_dims = (Point(0, 1), {"w": None}), {"a": 1, "b": (0, None)}
    assert_same(vmap(remat(f), in_dims, out_dims)(p, d), vmap(f, in_dims, out_dims)(p, d))


# ---------------------------------------------------------------- static arguments


def power(x, n, mode):
    assert type(n) is int and type(mode) is str
    return x**n if mode == "up" else -(x**n)


@pytest.mark.parametrize("transform", OBSERVATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_argnums": 1},
        {"static_argnums": (1, 2)},
        {"static_argnums": [1, 2]},
        {"static_argnums": (-1,)},
        {"static_argnames": "mode"},
        {"static_argnames": ("n", "mode")},
        {"static_argnums": (1,), "static_argnames": ("mode",)},
    ],
    ids=str,
)
def test_static_arguments(options, transform):
    want = observe(transform, power, (tensor(3), 3, "down"))
    assert_same(observe(transform, remat(power, **options), (tensor(3), 3, "down")), want)
    if "static_argnums" not in options:
        want = observe(transform, power, (tensor(3), 3), {"mode": "down"})
        assert_same(observe(transform, remat(power, **options), (tensor(3), 3), {"mode": "down"}), want)


@pytest.mark.parametrize("how", ["argnums", "argnames"])
def test_static_argument_is_the_object_itself(how):
    """Not flattened, not rebuilt: f sees the caller's object, in the forward and in the
    recomputation.
    """
    seen = []

    def f(x, config):
        seen.append(config)
        return x * config["scale"]

    config = {"scale": 2.0, "names": ["a"]}
    x = tensor(3, requires_grad=True)
    if how == "argnums":
        out = remat(f, static_argnums=1)(x, config)
    else:
        out = remat(f, static_argnames="config")(x, config=config)
    out.sum().backward()
    assert len(seen) == 2 and all(s is config for s in seen)
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_static_argument_given_by_its_name():
    """`static_argnums` names a parameter; a call that gives this parameter by keyword means the
    same.
    """
    seen = []

    def f(x, config):
        seen.append(config)
        return x * config["scale"]

    config = {"scale": 2.0}
    remat(f, static_argnums=1)(tensor(3), config=config)
    remat(f, static_argnames="config")(tensor(3), config)
    assert all(s is config for s in seen)


@pytest.mark.parametrize("transform", [grad, lambda f: lambda w: jvp(f, (w,), (w,))], ids=["grad", "jvp"])
def test_tensor_as_static_argument_is_never_silent(transform):
    def run(wrap):
        return transform(lambda w: wrap(w))(tensor(3))

    want = run(lambda w: positional(tensor(3, seed=1), w).sum())
    try:
        got = run(lambda w: remat(positional, static_argnums=1)(tensor(3, seed=1), w).sum())
    except FuncckptError as error:
        assert "static" in str(error)
    else:
        assert_same(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 5},
        {"static_argnums": "x"},
        {"static_argnums": 1.5},
        {"static_argnames": 3},
        {"static_argnames": "nobody"},
    ],
    ids=str,
)
def test_static_arguments_that_are_none(options):
    with pytest.raises(InputError) as caught:
        remat(power, **options)(tensor(3), 3, "down")
    assert isinstance(caught.value, TypeError)
    assert next(iter(options)) in str(caught.value) and "power" in str(caught.value)


# ---------------------------------------------------------------- what is left of f


def test_keeps_name_doc_and_signature():
    def f(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        """Scales."""
        return x * scale

    for g in (remat(f), remat(preserve_rng_state=False)(f), remat(f, determinism_check="values")):
        assert g.__name__ == "f" and g.__doc__ == "Scales." and g.__wrapped__ is f
        assert inspect.signature(g) == inspect.signature(f)


def test_decorator_forms():
    @remat
    def bare(x):
        return x.sin()

    @remat()
    def empty(x):
        return x.sin()

    @remat(static_argnames="n", determinism_check="none", preserve_rng_state=False)
    def options(x, n=1):
        return x.sin() * n

    x = tensor(3)
    for g in (bare, empty, options, remat(torch.sin)):
        assert_same(grad(lambda x, g=g: g(x).sum())(x), x.cos())


def test_wrong_arguments_raise_what_f_raises():
    for arguments in ((), (1, 2, 3)):
        with pytest.raises(TypeError, match="positional") as want:
            positional(*arguments)
        with pytest.raises(TypeError) as got:
            remat(positional)(*arguments)
        assert str(want.value) in str(got.value)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_without_a_checkpoint(name, wrap):
    assert_same(PROGRAMS[name](WRAPS[wrap]), PROGRAMS[name](plain))
