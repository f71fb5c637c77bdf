"""Functions that can reach nothing but their arguments: what counts as one, and that no check is lost."""

import types
import weakref
from contextlib import ExitStack

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.testing import assert_close

from funcckpt import ClosureError, MutationError, names, remat
from funcckpt.closed import Closed, closed_call, names_of

weight = torch.tensor(3.0)


def is_closed(f):
    """Whether a call of f, of tensors, would be one of a closed function."""
    found = names_of(f)
    return found is not None and closed_call(f, "f", found, ()) is not None


def tiny(x):
    return x.sin().cos()


def with_loop(x, w):
    for i in [1, 2]:
        x = (x @ w).tanh() * i + x**2
    return [x, (lambda y: y.exp())(x)]


def with_global(x):
    return x * weight


def with_import(x):
    import math

    return x * math.pi


def with_default(x, w=weight):
    return x * w


def that_assigns(x):
    global weight
    weight = x
    return x.sin()


def by_attributes(x):
    return x.__class__.mro()


def in_python(x):
    return x.norm()


@pytest.mark.parametrize("f", [tiny, with_loop])
def test_closed(f):
    assert is_closed(f)


@pytest.mark.parametrize(
    "f",
    [
        with_global,
        with_import,
        that_assigns,
        by_attributes,
        in_python,
        lambda x: x.data,
        lambda x: x.requires_grad_(),
        lambda x: x.retain_grad(),
        lambda x: x.grad_fn,
        lambda x: x.bernoulli(),
        lambda x: x.mark,
        torch.sin,
        torch.nn.Identity(),
    ],
)
def test_not_closed(f):
    assert not is_closed(f)


def test_names_that_draw_are_not_closed():
    """All methods of tensors whose operators draw random numbers, as torch marks them."""
    drawing = set()
    for name in dir(torch.Tensor):
        packet = getattr(torch.ops.aten, name, None)
        if isinstance(packet, torch._ops.OpOverloadPacket) and any(
            torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
            for overload in packet.overloads()
        ):
            drawing.add(name)
    assert {"bernoulli", "normal_", "multinomial"} <= drawing
    assert not drawing & names.ATTRIBUTES


STACKS = {
    "plain": lambda f, x: torch.autograd.grad(f(leaf := x.clone().requires_grad_()).sum(), leaf),
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vmap(grad)": lambda f, x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, 2 * x])),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "vmap(jvp)": lambda f, x: vmap(lambda x: jvp(f, (x,), (x,)))(torch.stack([x, 2 * x])),
    "grad(grad)": lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x),
    "plain over grad": lambda f, x: torch.autograd.grad(
        grad(lambda y: f(y).sum())(leaf := x.clone().requires_grad_()).sum(), leaf
    ),
}
X = torch.linspace(0.1, 1, 5, dtype=torch.float64)


def of_calls(monkeypatch):
    """The closed calls that are made from here on."""
    calls = []
    before = Closed.call
    monkeypatch.setattr(Closed, "call", lambda self, *args: calls.append(self) or before(self, *args))
    return calls


@pytest.mark.parametrize("stack", STACKS)
def test_values(stack, monkeypatch):
    calls = of_calls(monkeypatch)
    assert_close(STACKS[stack](remat(tiny), X), STACKS[stack](tiny, X))
    assert len(calls) == 1


def check_or_refuse(run):
    """Right, or an error that says what to do: what f reaches is never taken for a constant."""
    try:
        found = run(remat)
    except ClosureError as error:
        assert "Pass it as an argument" in str(error)
    else:
        assert_close(found, run(lambda f: f))


CHANGES = {
    "cos": (lambda x: x.cos(), lambda w: lambda x: x * w),
    "__add__": (lambda x: x + x, lambda w: lambda x, y: x * w * y),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", CHANGES)
def test_methods_that_were_changed_are_searched(stack, name, monkeypatch):
    calls = of_calls(monkeypatch)
    f, change = CHANGES[name]
    assert is_closed(f)

    def of_both(wrap):
        with monkeypatch.context() as patch:

            def g(w):
                patch.setattr(torch.Tensor, name, change(w), raising=False)
                return wrap(f)(torch.ones(5, dtype=torch.float64)) * w

            return STACKS[stack](g, X)

    check_or_refuse(of_both)
    assert not calls


def test_attributes_of_arguments_are_searched(monkeypatch):
    calls = of_calls(monkeypatch)

    def loss(wrap, w):
        x = torch.ones(5, dtype=torch.float64)
        x.cos = w
        f = wrap(lambda x: x.cos * x)
        return f(x).sum()

    check_or_refuse(lambda wrap: grad(lambda w: loss(wrap, w))(X))
    assert not calls


class Doubling(torch.overrides.TorchFunctionMode):
    """A mode that brings a tensor of its own into what f does."""

    def __init__(self, w):
        self.w = w

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * self.w if func is torch.Tensor.cos else out


def test_under_a_mode_they_are_searched(monkeypatch):
    calls = of_calls(monkeypatch)

    def loss(wrap, w):
        with Doubling(w):
            return wrap(tiny)(torch.ones(5, dtype=torch.float64)).sum()

    check_or_refuse(lambda wrap: grad(lambda w: loss(wrap, w))(X))
    assert not calls


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("f", [lambda x: x.mul_(2).sin(), lambda x: x.mul_(2).sum() + x.sin()])
def test_arguments_are_not_changed(f, stack):
    with pytest.raises((MutationError, RuntimeError), match=r"in place|in-place|inplace"):
        STACKS[stack](remat(f), X.clone())


def test_argument_that_is_not_differentiated_is_not_changed():
    def loss(x, w):
        return remat(lambda x, w: w.mul_(2) * x)(x, w).sum()

    for w in (X.clone(), torch.stack([X, X])):
        with pytest.raises(MutationError, match=r"argument \[1\]"):
            if w.dim() == 1:
                grad(loss)(X, w)
            else:
                vmap(grad(loss))(torch.stack([X, X]), w)


@pytest.mark.parametrize("stack", ["plain", "grad", "vmap(grad)"])
def test_function_that_was_changed_since(stack):
    """What it was in the forward, is recomputed."""

    def f(x):
        return x.sin()

    def g(x):
        y = checkpointed(x)
        f.__code__ = (lambda x: x.exp()).__code__
        return y

    sine = f.__code__
    checkpointed = remat(f)
    expected = STACKS[stack](torch.sin, X)
    assert_close(STACKS[stack](g, X), expected)
    f.__code__ = sine
    assert_close(STACKS[stack](checkpointed, X), expected)
    f.__code__, f.__defaults__ = (lambda x, w=1: x * w).__code__, (X,)
    assert_close(STACKS[stack](checkpointed, X), STACKS[stack](lambda x: x * X, X))


def test_defaults_that_f_is_given_are_found():
    f = types.FunctionType(with_default.__code__, globals(), argdefs=(X,))
    assert names_of(f) is not None
    checkpointed = remat(f)

    def loss(w):
        f.__defaults__ = (w,)
        return checkpointed(X).sum()

    assert_close(grad(loss)(X), X)


ONE = 1


@pytest.mark.parametrize("stack", ["plain", "grad", "vmap(grad)"])
def test_world_of_the_forward(stack):
    """A backward under autocast recomputes what the forward computed without, as for other functions."""

    def run(f):
        def g(x):
            y = remat(f)(x.float(), torch.eye(5))
            stack_of_worlds.enter_context(torch.autocast("cpu", torch.bfloat16))
            return y * 3

        with ExitStack() as stack_of_worlds:
            return STACKS[stack](g, X)

    def bare(x, w):
        return (x @ w).sin()

    assert is_closed(bare)
    assert_close(run(bare), run(lambda x, w: (x @ w).sin() * ONE), rtol=0, atol=0)


def test_outputs_that_share_memory_are_guarded():
    def loss(x):
        y = remat(lambda x: x[1:])(x * 1)
        with pytest.raises(RuntimeError):
            y.mul_(2)
        return y.sum()

    grad(loss)(X)


def test_inference_tensors():
    with torch.inference_mode():
        x = X.clone()
    assert_close(grad(lambda w: remat(lambda x, w: x.detach() * w)(x, w).sum())(X), X)


def test_randomness_that_is_an_error():
    """Nothing is drawn, so that vmap has nothing to refuse."""
    jacobian = torch.func.jacrev(remat(tiny))(X)
    assert_close(jacobian, torch.func.jacrev(tiny)(X))


def test_backward_in_another_level():
    """A pullback that is called under a vmap over its cotangents, and one that is differentiated."""
    y, pull = torch.func.vjp(remat(tiny), X)
    _, expected = torch.func.vjp(tiny, X)
    cotangents = torch.eye(5, dtype=torch.float64)
    assert_close(vmap(pull)(cotangents), vmap(expected)(cotangents))
    second = grad(lambda ct: pull(ct)[0].sin().sum())
    assert_close(second(y.detach()), grad(lambda ct: expected(ct)[0].sin().sum())(y.detach()))


def test_cotangents_that_alone_are_batched():
    """The inputs of the checkpoint are the same for all samples, what is done with its output is not."""
    xs = torch.stack([X, 2 * X])

    def gradients(f):
        return vmap(grad(lambda w, x: (f(w) * x).sum()), (None, 0))(X, xs)

    assert_close(gradients(remat(tiny)), gradients(tiny))


def test_plain_forward_mode_over_a_transform():
    """A dual tensor is looked at by no level that functorch knows."""
    forward_ad = torch.autograd.forward_ad

    def tangents(f):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(X, X.cos())
            return forward_ad.unpack_dual(grad(lambda x: f(x).sum())(dual))[:2]

    assert_close(tangents(remat(tiny)), tangents(tiny))


# -- variables of the enclosing function ------------------------------------------------------------------


def around(w, scale=2.0, act=torch.tanh):
    return lambda x: act((lambda y: y * w)(x)).sin() * scale


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    "function_of_both",
    [
        lambda wrap: lambda x: wrap(around(x * 2))(x),
        lambda wrap: lambda x: wrap(around(x))(x.detach()),
        lambda wrap: lambda x: wrap(around(x))(torch.ones(5, dtype=torch.float64)) * x,
        lambda wrap: lambda x: wrap(around(torch.ones(5, dtype=torch.float64)))(x),
    ],
    ids=["both", "the same", "the variable", "the argument"],
)
def test_values_around_variables(function_of_both, stack, monkeypatch):
    """What they hold gets its gradient, batch dimension and tangent."""
    calls = of_calls(monkeypatch)
    found = STACKS[stack](function_of_both(remat), X)
    assert_close(found, STACKS[stack](function_of_both(lambda f: f), X))
    assert len(calls) == 1


def test_the_same_tensor_is_one_input(monkeypatch):
    calls = of_calls(monkeypatch)
    x = X.clone().requires_grad_()
    w, same = x, x
    y = remat(lambda x: x * w * same)(x)
    assert len(calls) == 1 and len(y.grad_fn.saved_tensors) == 1
    assert_close(torch.autograd.grad(y.sum(), x), (3 * X**2,))


def test_variables_of_the_forward(monkeypatch):
    """They may hold something else by the time of the recomputation, or nothing."""
    calls = of_calls(monkeypatch)
    x = X.clone().requires_grad_()
    ys = []
    w = scale = None
    for scale in (1.0, 2.0):
        w = X * scale
        ys.append(remat(lambda x: (x * w * scale).sin())(x))  # noqa: B023
    w = scale = None
    for y, factor in zip(ys, (1.0, 4.0), strict=True):
        assert_close(torch.autograd.grad(y.sum(), x), (X * factor * (X * X * factor).cos(),))
    assert len(calls) == 2


def test_variables_without_a_gradient():
    """One that f does not use, and one that does not require it."""
    x, w, unused = X.clone().requires_grad_(), X.clone(), X.clone().requires_grad_()
    y = remat(lambda x: x * w if x.dim() else x * unused)(x)
    assert_close(torch.autograd.grad(y.sum(), (x, unused), allow_unused=True), (X, None))


def test_tensors_in_variables_are_freed():
    leaf = X.clone().requires_grad_()
    w = leaf.exp()
    f = around(w)
    y = remat(f)(X)
    reference = weakref.ref(w)
    y.sum().backward()
    del w, f
    assert reference() is None
    assert y.grad_fn is not None


@pytest.mark.parametrize("stack", ["plain", "grad", "vmap(grad)", "jvp"])
def test_variables_are_not_changed(stack):
    def g(x):
        w = torch.ones(5, dtype=torch.float64)
        return remat(lambda x: w.mul_(2) * x)(x)

    with pytest.raises(MutationError, match="closure variable 'w'"):
        STACKS[stack](g, X)


def test_variables_that_are_changed_afterwards():
    w = X.clone()
    x = X.clone().requires_grad_()
    f = remat(lambda x: (x * w).sin())
    y, (z, pull) = f(x), torch.func.vjp(f, X)
    w.mul_(2)
    for backward in (lambda: y.sum().backward(), lambda: pull(z)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward()


def marked(w):
    w.cos = torch.sin
    return w


def that_is_empty():
    def f(x):
        return x * later

    return f
    later = 1


def that_assigns_a_variable():
    n = 0

    def f(x):
        nonlocal n
        n += 1
        return x * n

    return f


@pytest.mark.parametrize(
    "f",
    [
        around(torch.nn.Parameter(X)),
        around(marked(X.clone())),
        around(torch.nn.Buffer(X)),
        around(X, scale=[X]),
        around(X, scale=(1.0,)),
        around(X, act=tiny),
        around(X, act=torch.nn.functional.relu),
        around(X, act=torch.nn.Tanh()),
        around(X, act=torch.dropout),
        around(X, act=torch),
        that_is_empty(),
        that_assigns_a_variable(),
    ],
)
def test_not_closed_around_variables(f):
    assert not is_closed(f)


@pytest.mark.parametrize("stack", STACKS)
def test_under_a_mode_variables_are_searched(stack, monkeypatch):
    calls = of_calls(monkeypatch)

    def of_both(wrap):
        def g(x):
            with Doubling(x):
                return wrap(around(x * x))(torch.ones(5, dtype=torch.float64)) * x

        return STACKS[stack](g, X)

    check_or_refuse(of_both)
    assert not calls
