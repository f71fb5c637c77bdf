"""What changes between the forward and the recomputation is right or an error, never another
gradient.
"""

import pytest
import torch
from oracles import F64, assert_same, compare, plain, tensor, total, weight
from support import Changing
from torch import nn
from torch.func import grad, hessian, jvp, vjp, vmap

from funcckpt import CheckpointError, MutationError, remat

# ---------------------------------------------------------------- an input is changed after the
# call


def saves(x):
    return x.sin() * x


def changed_after(call, made=lambda x: x * 1, change=lambda x: x.add_(1)):
    """A loss in which something is changed in place after f has run."""

    def with_wrap(wrap):
        def loss(x):
            w = made(x)
            y = call(wrap, w)
            change(w)
            return total(y)

        return loss

    return with_wrap


def _backward(loss, x):
    x = x.clone().requires_grad_()
    loss(x).backward()
    return x.grad


def _double_backward(loss, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
    return torch.autograd.grad(total(g), x)


REVERSE = {
    "backward": _backward,
    "double_backward": _double_backward,
    "grad": lambda loss, x: grad(loss)(x),
    "grad_grad": lambda loss, x: grad(lambda x: total(grad(loss)(x)))(x),
    "vmap_grad": lambda loss, x: vmap(grad(loss))(torch.stack([x, x * 2])),
    "grad_vmap": lambda loss, x: grad(lambda x: vmap(loss)(x).sum())(torch.stack([x, x * 2])),
    "hessian": lambda loss, x: hessian(loss)(x),
    "jvp_grad": lambda loss, x: jvp(grad(loss), (x,), (x,)),
    "vjp": lambda loss, x: vjp(loss, x)[1](torch.ones((), dtype=F64)),
}
FORWARD = {
    "jvp": lambda loss, x: jvp(loss, (x,), (x,)),
    "vmap": lambda loss, x: vmap(loss)(torch.stack([x, x * 2])),
    "vmap_jvp": lambda loss, x: vmap(lambda x: jvp(loss, (x,), (x,)))(torch.stack([x, x * 2])),
}
CHANGES = {
    "argument": changed_after(lambda wrap, x: wrap(saves)(x)),
    "captured": changed_after(lambda wrap, w: wrap(lambda: saves(w))()),
    "base_of_a_view": changed_after(lambda wrap, x: wrap(saves)(x[0]), lambda x: torch.stack([x, x])),
}


@pytest.mark.parametrize("transform", REVERSE)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_the_call_raises(change, transform):
    for wrap in (plain, remat):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            REVERSE[transform](CHANGES[change](wrap), tensor(3))
        assert isinstance(caught.value, MutationError) == (wrap is remat)


@pytest.mark.parametrize("transform", FORWARD)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_the_call_is_right_where_nothing_is_recomputed(change, transform):
    run = lambda wrap: FORWARD[transform](CHANGES[change](wrap), tensor(3))
    assert_same(run(remat), run(plain))


def test_changed_without_need_of_the_value_is_no_wrong_gradient():
    """f does not need x, and plain torch forgives; remat has to have it as it was."""

    def run(wrap):
        x = tensor(3, requires_grad=True)
        c = x * 1
        y = wrap(lambda c: c * 3)(c)
        c.mul_(2)
        y.sum().backward()
        return x.grad

    try:
        got = run(remat)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert_same(got, run(plain))


@pytest.mark.parametrize(
    "place", ["cell", "list", "attribute", "global", "buffer", "frozen_parameter", "default"]
)
@pytest.mark.parametrize("transform", ["backward", "vjp", "vmap_vjp"])
def test_captured_constant_changed(place, transform):
    """It requires no gradient, so that no graph guards it; the recomputation would take the new
    value.
    """

    def run(wrap, change):
        c = tensor(3, seed=1)
        f = capture(wrap, place, c)
        x = tensor(3)
        if transform == "backward":
            x.requires_grad_()
            y = total(f(x))
            change(c)
            y.backward()
            return x.grad

        def pulled(x):
            y, pull = vjp(f, x)
            change(c)
            return pull(weight(y))

        return pulled(x) if transform == "vjp" else vmap(pulled)(torch.stack([x, x * 2]))

    if transform == "backward":  # torch notices; under functorch its version counters do not
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(plain, lambda c: c.add_(1))
    want = run(plain, lambda c: None)
    try:
        got = run(remat, lambda c: c.add_(1))
    except MutationError as error:
        assert "float64[3]" in str(error) and "in place" in str(error)
    else:
        assert place == "buffer"  # remat may keep a copy of a training module's buffers
        assert_same(got, want)


def capture(wrap, place, c, act=lambda x, c: torch.tanh(x * c)):
    if place == "cell":
        return wrap(lambda x: act(x, c))
    if place == "list":
        items = [c]
        return wrap(lambda x: act(x, items[0]))
    if place == "default":
        return wrap(lambda x, c=c: act(x, c))
    if place == "global":
        globals()["CONSTANT"] = c
        return wrap(lambda x: act(x, CONSTANT))  # noqa: F821
    module = nn.Module()
    if place == "attribute":
        module.c = c
    elif place == "buffer":
        module.register_buffer("c", c)
    else:
        module.c = nn.Parameter(c, requires_grad=False)
    return wrap(lambda x: act(x, module.c))


# ---------------------------------------------------------------- f changes what it is given


def writes_to_input(x):
    y = x.exp()
    x.add_(1)
    return y * x


def activates_in_place(x):
    return torch.relu_(x) * 2


WRITERS = {f.__name__: f for f in (writes_to_input, activates_in_place)}


def around(wrap, f):
    def loss(x):
        x = x * 1
        y = wrap(f)(x)
        return total(y) + total(x)  # the caller sees the change

    return loss


@pytest.mark.parametrize("transform", REVERSE)
@pytest.mark.parametrize("writer", WRITERS)
def test_input_changed_inside(writer, transform):
    REVERSE[transform](around(plain, WRITERS[writer]), tensor(3))  # plain torch allows it
    with pytest.raises(MutationError) as caught:
        REVERSE[transform](around(remat, WRITERS[writer]), tensor(3))
    text = str(caught.value)
    assert writer in text and "float64" in text and "3" in text and "clone" in text


def test_what_may_write_unseen_and_does_not():
    """Also where there is a NaN, which equals nothing."""

    def f(x, y):
        mask = y.data > 1
        return torch.where(mask, x, x * 2).sin()

    def run(wrap):
        x, y = tensor(4, requires_grad=True), torch.tensor([0.0, 2.0, float("nan"), 1.0], dtype=F64)
        return torch.autograd.grad(wrap(f)(x, y).sum(), x)

    compare(run, remat)


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
@pytest.mark.parametrize("place", ["cell", "list", "attribute", "global", "buffer", "default"])
def test_captured_changed_inside(place, transform):
    def run(wrap):
        c = torch.zeros((), dtype=F64)

        def act(x, c):
            if not torch._C._functorch.is_functorch_wrapped_tensor(c):
                c.add_(1)
            return torch.tanh(x * (c + 1))

        f = capture(wrap, place, c, act)
        g = REVERSE[transform](lambda x: total(f(x)), tensor(3))
        return g, c

    compare(run, remat, allowed=(MutationError,))


def test_random_inputs_survive_a_clone():
    """The way out that the error names works."""

    def f(x):
        x = x.clone()
        x.add_(1)
        return x.sin() * x

    for transform in REVERSE.values():
        run = lambda wrap, transform=transform: transform(around(wrap, f), tensor(3))
        assert_same(run(remat), run(plain))


# ---------------------------------------------------------------- determinism


DIFFERENCES = {
    # what the forward gives, what the recomputation gives, and words of both sides
    "shape": (lambda x: x.sin(), lambda x: x.sin()[:2], ("[3]", "[2]")),
    "dtype": (lambda x: x.sin(), lambda x: x.sin().float(), ("float64", "float32")),
    "device": (
        lambda x: (x.sin(), x.long()),
        lambda x: (x.sin(), x.long().to("meta")),
        ("cpu", "meta"),
    ),
    "structure": (lambda x: (x.sin(),), lambda x: {"key": x.sin()}, ("key", "tuple")),
    "length": (lambda x: (x.sin(), x.cos()), lambda x: (x.sin(), x.cos(), x.exp()), ("tuple",)),
    "integer_output": (
        lambda x: (x.sin(), x.long()),
        lambda x: (x.sin(), x.int()),
        ("int64", "int32"),
    ),
}
TRANSFORMS = {k: REVERSE[k] for k in ("backward", "grad", "vmap_grad", "grad_vmap", "hessian", "vjp")}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("check", ["default", "values"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_another_output_is_named(difference, check, transform):
    first, then, words = DIFFERENCES[difference]
    f = Changing(first, then)
    with pytest.raises(CheckpointError) as caught:
        TRANSFORMS[transform](lambda x: total(remat(f, determinism_check=check)(x)), tensor(3))
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "Changing" in text and "determinism_check" in text, text


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_check_off(transform):
    """An output that carries no gradient differs; with the check off nobody minds."""

    def run(wrap):
        f = Changing(lambda x: (x.sin(), x.long()), lambda x: (x.sin(), x.int()))
        return TRANSFORMS[transform](lambda x: total(wrap(f, determinism_check="none")(x)), tensor(3))

    assert_same(run(remat), run(lambda f, **options: lambda x: f.bodies[0](x)))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values(transform):
    make = lambda: Changing(lambda x: x.sin(), lambda x: x.cos())
    with pytest.raises(CheckpointError, match="value") as caught:
        TRANSFORMS[transform](lambda x: total(remat(make(), determinism_check="values")(x)), tensor(3))
    assert "Changing" in str(caught.value) and "float64" in str(caught.value)
    TRANSFORMS[transform](lambda x: total(remat(make(), determinism_check="none")(x)), tensor(3))


def noisy(x):
    return torch.nn.functional.dropout(x.sin() * torch.randn(3, dtype=F64), 0.5)


@pytest.mark.parametrize("transform", ["backward", "grad", "vjp"])
def test_values_pass_where_the_function_is_deterministic(transform):
    def infinite(x):
        return x / 0.0, (x - x) / 0.0, x.sin()  # inf and nan are equal to themselves

    def gives_back(x):
        y = x.sin()
        return x, y, y, x.argsort()  # an input is no output to compare

    for f in (saves, noisy, infinite, gives_back):
        run = lambda wrap, f=f: REVERSE[transform](
            lambda x: total(wrap(f, determinism_check="values")(x)), tensor(3)
        )
        torch.manual_seed(1)
        got = run(remat)
        torch.manual_seed(1)
        assert_same(got, run(plain))


def test_values_see_another_random_number():
    with pytest.raises(CheckpointError):
        _backward(
            lambda x: total(remat(noisy, determinism_check="values", preserve_rng_state=False)(x)),
            tensor(3),
        )


def test_other_non_tensor_outputs_in_the_recomputation_do_not_matter():
    """A counter among the outputs is not what the backward needs."""
    f = Changing(lambda x: (x.sin(), 1), lambda x: (x.sin(), 2))
    got = _backward(lambda x: total(remat(f)(x)), tensor(3))
    assert_same(got, _backward(lambda x: total(x.sin()), tensor(3)))
