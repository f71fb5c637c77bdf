"""Names that closed functions may use: which do, and that what they stand for is looked at each time."""

import builtins
import functools
import math
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from test_closed import STACKS, Doubling, X, check_or_refuse, is_closed, of_calls
from torch import nn, sin
from torch.func import grad
from torch.nn.functional import softplus as smooth
from torch.testing import assert_close

from funcckpt import MutationError, names, remat

SCALE = 0.5
weight = torch.ones(5, dtype=torch.float64)


def library(x):
    return torch.cos(torch.sin(x))


def imported(x):
    return smooth(sin(x)) * SCALE


def of_modules(x):
    y = torch.special.expit(x) + torch.linalg.vector_norm(x) + torch.fft.fft(x).real
    return F.gelu(y) + torch.nn.functional.silu(y) * math.sqrt(math.pi)


def in_python(x):
    return F.layer_norm(F.relu(x), x.shape) + F.softmax(x, dim=0) + F.leaky_relu(x, SCALE)


def with_builtins(x):
    ys = [torch.exp(x * float(i)) for i, _ in zip(range(3), enumerate(x.shape))]
    return sum(map(torch.tanh, ys)) + torch.stack(sorted(ys, key=lambda y: max(y.shape))).sum(0) * len(ys)


def with_constants(x):
    return (
        x.sin() * torch.arange(5, dtype=torch.float64) + torch.tensor(2.0) + torch.zeros(5).to(torch.float64)
    )


def raises(x):
    if x.dim() != 1:
        raise ValueError("not a vector")
    return torch.sin(x)


CLOSED = [library, imported, of_modules, in_python, with_builtins, with_constants, raises]


@pytest.mark.parametrize("f", CLOSED)
def test_closed(f):
    assert is_closed(f)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("f", CLOSED)
def test_values(f, stack, monkeypatch):
    calls = of_calls(monkeypatch)
    assert_close(STACKS[stack](remat(f), X), STACKS[stack](f, X))
    assert len(calls) == 1


def global_tensor(x):
    return torch.sin(x) * weight


def helper(x):
    return x * weight


def own_helper(x):
    return helper(x)


def module_that_goes_elsewhere(x):
    library = torch
    return library.sin(x)


def one_of_two_modules(x):
    module = torch if x.dim() else F
    return module.relu(x)


def attribute_is_set(x):
    x.cos = torch.sin(x)
    return x.sin()


def class_pattern(x):
    match 1:
        case int(real=one):
            return torch.sin(x) * one


def cached(x):
    return wrapped(x)


wrapped = functools.wraps(torch.sin)(lambda x: x * weight)


@pytest.mark.parametrize(
    "f",
    [
        global_tensor,
        own_helper,
        module_that_goes_elsewhere,
        one_of_two_modules,
        attribute_is_set,
        class_pattern,
        cached,
        lambda x: torch.rand(3) * x,
        lambda x: torch.rand_like(x) * x,
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: F.dropout(x),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.batch_norm(x, x, x, training=True),
        lambda x: torch.batch_norm(x, x, x, x, x, True, 0.1, 1e-5, False),
        lambda x: torch.instance_norm(x, x, x, x, x, True, 0.1, 1e-5, False),
        lambda x: torch.autograd.grad(x.sum(), x),
        lambda x: torch.func.grad(torch.sin)(x),
        lambda x: torch.vmap(torch.sin)(x),
        lambda x: torch.compile(torch.sin)(x),
        lambda x: torch.ops.aten.sin(x),
        lambda x: torch.ops.aten.sin.default(x),
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x),
        lambda x: torch.load("x"),
        lambda x: torch.save(x, "x"),
        lambda x: torch.from_file("x"),
        lambda x: torch.manual_seed(0),
        lambda x: torch.set_default_dtype(torch.float64),
        lambda x: torch.set_grad_enabled(False),
        lambda x: torch.no_grad(),
        lambda x: torch._C._set_grad_enabled(False),
        lambda x: torch.Tensor.requires_grad_(x),
        lambda x: torch.detach_(x),
        lambda x: torch.get_default_dtype(),
        lambda x: nn.Linear(3, 3)(x),
        lambda x: nn.functional.__dict__["relu"](x),
        lambda x: F.relu.__globals__,
        lambda x: torch.sin.__self__,
        lambda x: getattr(x, "data"),  # noqa: B009
        lambda x: setattr(x, "data", x),
        lambda x: eval("weight") * x,
        lambda x: globals()["weight"] * x,
        lambda x: id(x) * x,
        lambda x: set([x, x.sin()]).pop(),
        lambda x: type(x),
        lambda x: print(x),
        lambda x: next(iter(x)),
        lambda x: undefined(x),  # noqa: F821
        lambda x: torch.undefined(x),
    ],
)
def test_not_closed(f):
    assert not is_closed(f)


def test_functions_that_draw_are_not_allowed():
    """All functions of torch whose operators draw random numbers, as torch marks them, or take a generator."""
    for name in dir(torch):
        packet = getattr(torch.ops.aten, name, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or not names._is_operator(
            getattr(torch, name)
        ):
            continue
        for overload in (getattr(packet, o) for o in packet.overloads()):
            assert torch.Tag.nondeterministic_seeded not in overload.tags
            assert "Generator" not in str(overload._schema)
            writes = [a for a in overload._schema.arguments if "!" in str(a) and not a.kwarg_only]
            assert name.endswith("_") or not writes


# -- what the names stand for is changed ------------------------------------------------------------------


def times(w):
    return lambda x, *rest: x * w


def sum_times(w, original=sum):
    """`sum` for all but tensors."""

    def changed(xs, *start):
        xs = [*xs]
        return xs[0] * w if xs and isinstance(xs[0], torch.Tensor) else original(xs, *start)

    return changed


def of_torch(x):
    return torch.sin(x)


def of_functional(x):
    return F.leaky_relu(x)


def of_builtin(x):
    return sum([torch.sin(x), x])


def brings(input, negative_slope=0.01, inplace=False):
    return input * brought  # noqa: F821


# The function, and for a tensor what is assigned: in which of its globals or in what, the name, and the value.
CHANGES = {
    "torch.sin": (of_torch, lambda w: (torch, "sin", times(w))),
    "torch": (of_torch, lambda w: (None, "torch", types.SimpleNamespace(sin=times(w)))),
    "F": (of_functional, lambda w: (None, "F", types.SimpleNamespace(leaky_relu=times(w)))),
    "F.leaky_relu": (of_functional, lambda w: (F, "leaky_relu", times(w))),
    "F.leaky_relu.__code__": (of_functional, lambda w: (F.leaky_relu, "__code__", brings.__code__)),
    "F.leaky_relu.__defaults__": (of_functional, lambda w: (F.leaky_relu, "__defaults__", (0.5, False))),
    "what F.leaky_relu calls": (of_functional, lambda w: (torch._C._nn, "leaky_relu", times(w))),
    "sum": (of_builtin, lambda w: (None, "sum", sum_times(w))),
    "builtins.sum": (of_builtin, lambda w: (builtins, "sum", sum_times(w))),
}


def with_own_globals(f):
    return types.FunctionType(f.__code__, {"torch": torch, "F": F, "__builtins__": builtins})


def assign(patch, f, place, name, value, w):
    patch.setattr(F, "brought", w, raising=False)
    if place is None:
        patch.setitem(f.__globals__, name, value)
    else:
        patch.setattr(place, name, value)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", CHANGES)
def test_changed_before(name, stack, monkeypatch):
    """It is searched, whether it was closed before or not."""
    f, change = CHANGES[name]
    f = with_own_globals(f)
    assert_close(STACKS["grad"](remat(f), X), STACKS["grad"](f, X))
    calls = of_calls(monkeypatch)

    def of_both(wrap):
        with monkeypatch.context() as patch:

            def g(w):
                assign(patch, f, *change(w), w)
                return wrap(f)(torch.ones(5, dtype=torch.float64)) * w * w

            return STACKS[stack](g, X)

    check_or_refuse(of_both)
    assert len(calls) == (name == "F.leaky_relu.__defaults__")
    assert is_closed(f)


@pytest.mark.parametrize("stack", ["plain", "grad", "vmap(grad)", "plain over grad"])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_between_forward_and_backward(name, stack, monkeypatch):
    """The recomputation finds what the forward found, or says that it does not."""
    f, change = CHANGES[name]
    f = with_own_globals(f)
    expected = STACKS[stack](lambda x: f(x) * x, X)
    with monkeypatch.context() as patch:

        def g(x):
            y = remat(f)(x) * x
            assign(patch, f, *change(2.0), 2.0)
            return y

        if name in ("torch", "F", "sum"):
            assert_close(STACKS[stack](g, X), expected)
        else:
            with pytest.raises(MutationError, match="since the forward"):
                STACKS[stack](g, X)


def test_module_with_getattr(monkeypatch):
    """A name that a module computes may be another thing each time."""
    module = types.ModuleType("of_user")
    module.__getattr__ = lambda name: times(weight)
    f = types.FunctionType((lambda x: module_of_user.sin(x)).__code__, {"module_of_user": module})  # noqa: F821
    assert not is_closed(f)
    monkeypatch.setattr(torch.special, "__getattr__", lambda name: times(weight), raising=False)
    assert not is_closed(lambda x: torch.special.no_such(x))
    assert is_closed(lambda x: torch.special.expit(x))


class Computing(types.ModuleType):
    def __getattribute__(self, name):
        return times(weight) if name == "sin" else super().__getattribute__(name)


def test_module_of_another_class():
    before = type(torch)
    assert is_closed(library)
    torch.__class__ = Computing
    try:
        assert not is_closed(library)
    finally:
        torch.__class__ = before
    assert is_closed(library)


@pytest.mark.parametrize("stack", STACKS)
def test_under_a_mode_they_are_searched(stack, monkeypatch):
    calls = of_calls(monkeypatch)

    def of_both(wrap):
        def g(w):
            with Doubling(w):
                return wrap(library)(torch.ones(5, dtype=torch.float64)) * w * w

        return STACKS[stack](g, X)

    check_or_refuse(of_both)
    assert not calls


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: torch.sin(x, out=w),
        lambda x, w: torch.relu_(w) * x,
        lambda x, w: F.relu(w, inplace=True) * x,
        lambda x, w: F.embedding(torch.tensor([0]), w.reshape(5, 1), max_norm=0.01) * x,
    ],
)
def test_what_is_written_to(f, stack):
    assert is_closed(f)
    with pytest.raises((MutationError, RuntimeError), match=r"in place|in-place|inplace|out="):
        STACKS[stack](lambda x: remat(f)(x, X.clone()), X)


def test_kernel_that_somebody_has_registered(monkeypatch):
    """Python code below an operator may bring a tensor of its own."""
    warnings.simplefilter("ignore")  # torch's, that it replaces its own
    calls = of_calls(monkeypatch)
    kept = []
    library = torch.library.Library("aten", "IMPL")
    library.impl("digamma", lambda x: x * kept[-1], "Autograd", allow_override=True)
    try:

        def of_both(wrap):
            def g(w):
                kept.append(w)
                return wrap(lambda x: torch.digamma(x))(torch.ones(5, dtype=torch.float64)).sum()

            return grad(g)(X)

        check_or_refuse(of_both)
        assert not calls
    finally:
        library._destroy()
    assert is_closed(lambda x: torch.digamma(x))


def test_default_dtype_of_the_forward():
    """What is made of numbers has the dtype that it had in the forward."""

    def loss(x):
        y = remat(lambda x: torch.arange(5).div(3) * x)(x)
        torch.set_default_dtype(torch.float64)
        return y.sum()

    try:
        found = grad(loss)(X.float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(found, torch.arange(5).div(3), rtol=0, atol=0)


def test_the_same_code_with_other_globals():
    """Code is looked at once, and its globals each time."""
    code = (lambda x: g(x)).__code__  # noqa: F821
    ours = types.FunctionType(code, {"g": torch.sin, "__builtins__": builtins})
    theirs = types.FunctionType(code, {"g": lambda x: x.sin() * X, "__builtins__": builtins})
    for _ in range(2):
        assert is_closed(ours) and not is_closed(theirs)
    for f in (ours, theirs):
        assert_close(STACKS["vmap(grad)"](remat(f), X), STACKS["vmap(grad)"](f, X))


def test_builtins_of_another_kind():
    """A function may have been made with other builtins than those of Python."""
    f = types.FunctionType(
        (lambda x: sum([x, x])).__code__, {"__builtins__": {"sum": lambda xs: xs[0] * weight}}
    )
    assert not is_closed(f)


def test_what_copying_a_tensor_leaves_in_its_class(monkeypatch):
    """`copyreg` notes the slots of a class when an object of it is copied."""
    monkeypatch.setattr(torch.Tensor, "__slotnames__", [], raising=False)
    assert names.methods_are_torchs()
    monkeypatch.setattr(torch.Tensor, "sin", torch.Tensor.cos, raising=False)
    assert not names.methods_are_torchs()
