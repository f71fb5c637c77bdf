"""What changes between the forward and the recomputation is right or an error, never another gradient."""

import pytest
import torch
from oracles import F64, FORWARD, REVERSE, assert_same, compare, plain, tensor, total, weight
from support import WRAPS, Changing
from torch import nn
from torch.func import hessian, jacfwd, jvp, vjp, vmap

from funcckpt import CheckpointError, MutationError, checkpoint, remat

SOME = "backward", "grad", "vmap_grad"
saves = lambda x: x.sin() * x
CHANGES = {
    "argument": lambda wrap, x: wrap(saves)(x),
    "captured": lambda wrap, w: wrap(lambda: saves(w))(),
    "base_of_a_view": lambda wrap, x: wrap(saves)(x[0]),
}


@pytest.mark.parametrize("transform", REVERSE | FORWARD)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_the_call(change, transform):
    def run(wrap):
        def loss(x):
            w = torch.stack([x, x]) if change == "base_of_a_view" else x * 1
            y = CHANGES[change](wrap, w)
            w.add_(1)
            return total(y)

        return (REVERSE | FORWARD)[transform](loss, tensor(3))

    if transform in FORWARD:  # nothing is recomputed
        compare(run, remat)
        return
    for wrap in (plain, remat):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            run(wrap)
        assert isinstance(caught.value, MutationError) == (wrap is remat)


def capture(wrap, place, c, act=lambda x, c: torch.tanh(x * c)):
    if place == "cell":
        return wrap(lambda x: act(x, c))
    if place == "default":
        return wrap(lambda x, c=c: act(x, c))
    module = nn.Module()
    if place == "buffer":
        module.register_buffer("c", c)
    else:
        module.c = nn.Parameter(c, requires_grad=False)
    return wrap(lambda x: act(x, module.c))


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_model_that_is_frozen_for_the_forward_and_trained_before_the_backward(wrap):
    critic, x = nn.Linear(3, 3, dtype=F64).requires_grad_(False), tensor(3, requires_grad=True)
    y = WRAPS[wrap](critic)(x.sin()).sum()
    critic.requires_grad_(True)
    with torch.no_grad():
        critic.weight.mul_(2)
    with pytest.raises(MutationError, match="as an optimizer changes a parameter"):
        y.backward()


@pytest.mark.parametrize("place", ["cell", "default", "buffer", "frozen_parameter"])
@pytest.mark.parametrize("transform", ["backward", "vjp", "vmap_vjp"])
def test_captured_constant_changed(place, transform):
    """It requires no gradient, so that no graph guards it; the recomputation would take the new value."""

    def run(wrap, change):
        c, x = tensor(3, seed=1), tensor(3)
        f = capture(wrap, place, c)
        if transform == "backward":
            y = total(f(x.requires_grad_()))
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


@pytest.mark.parametrize("transform", REVERSE)
def test_input_changed_inside(transform):
    def writes(x):
        y = x.exp()
        x.add_(1)
        return y * x

    def around(f):
        def loss(x):
            x = x * 1
            return total(f(x)) + total(x)  # the caller sees the change

        return loss

    REVERSE[transform](around(writes), tensor(3))  # plain torch allows it
    with pytest.raises(MutationError) as caught:
        REVERSE[transform](around(remat(writes)), tensor(3))
    assert all(word in str(caught.value) for word in ("writes", "float64", "3", "clone"))


def test_write_to_a_product_of_what_is_not_used():
    """Of a missing tangent torch makes zeros to which nobody may write."""

    def run(wrap):
        def f(x):
            def of(p):
                (x * p).sin_()
                return p * 2

            return jvp(wrap(of), (x,), (x.sin(),))[0].pow(4).sum()

        return jacfwd(hessian(f))(tensor(3))

    compare(run, remat)


@pytest.mark.parametrize("place", ["cell", "buffer", "default"])
def test_captured_changed_inside(place):
    def run(wrap):
        c = torch.zeros((), dtype=F64)
        f = capture(wrap, place, c, lambda x, c: torch.tanh(x * (c.add_(1) + 1)))
        return REVERSE["backward"](f, tensor(3)), c

    compare(run, remat, allowed=(MutationError,))


DIFFERENCES = {
    # What the forward gives, what the recomputation gives, and words of both sides.
    "shape": (lambda x: x.sin(), lambda x: x.sin()[:2], ("[3]", "[2]")),
    "dtype": (lambda x: x.sin(), lambda x: x.sin().float(), ("float64", "float32")),
    "device": (lambda x: (x.sin(), x.long()), lambda x: (x.sin(), x.long().to("meta")), ("cpu", "meta")),
    "structure": (lambda x: (x.sin(),), lambda x: {"key": x.sin()}, ("key", "tuple")),
    "integer": (lambda x: (x.sin(), x.long()), lambda x: (x.sin(), x.int()), ("int64", "int32")),
    "value": (lambda x: x.sin(), lambda x: x.cos(), ("value", "float64")),
    "counter": (lambda x: (x.sin(), 1), lambda x: (x.sin(), 2), ()),  # not what the backward needs
}


@pytest.mark.parametrize("transform", [*SOME, "grad_vmap", "hessian"])
@pytest.mark.parametrize("check", ["default", "values"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_another_output_is_named(difference, check, transform):
    first, then, words = DIFFERENCES[difference]
    run = lambda check: REVERSE[transform](remat(Changing(first, then), determinism_check=check), tensor(3))
    if (difference, check) in (("value", "default"), ("counter", "default"), ("counter", "values")):
        if (difference, transform) != ("counter", "grad_vmap"):  # which returns tensors alone
            run("default")
        return
    with pytest.raises(CheckpointError) as caught:
        run(check)
    text = str(caught.value)
    assert all(word in text for word in (*words, "Changing", "determinism_check")), text
    if difference == "integer":  # it has no gradient: with the check off nobody minds
        assert_same(run("none"), REVERSE[transform](first, tensor(3)))


noisy = lambda x: torch.nn.functional.dropout(x.sin() * torch.randn(3, dtype=F64), 0.5)


@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_values_pass_where_the_function_is_deterministic(transform):
    def infinite(x):
        return x / 0.0, (x - x) / 0.0, x.sin()  # inf and nan are equal to themselves

    def gives_back(x):
        y = x.sin()
        return x, y, y, x.argsort()  # an input is no output to compare

    for f in (saves, noisy, infinite, gives_back):
        results = []
        for each in (remat(f, determinism_check="values"), f):
            torch.manual_seed(1)
            results.append(REVERSE[transform](each, tensor(3)))
        assert_same(*results)


def test_values_see_another_random_number():
    with pytest.raises(CheckpointError):
        REVERSE["backward"](remat(noisy, determinism_check="values", preserve_rng_state=False), tensor(3))


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda x: checkpoint(f, x)], ids=["remat", "hooks"])
@pytest.mark.parametrize("view", [lambda w: w.T, lambda w: w.mT, lambda w: w.real], ids=["T", "mT", "real"])
def test_a_view_of_a_captured_tensor_that_has_changed(wrap, view):
    """An attribute, as a shape is, whose values are read."""
    w, x = tensor(3, 3), tensor(2, 3, requires_grad=True)
    y = wrap(lambda x: (x @ view(w)).sin().sum())(x)
    shape = wrap(lambda x: x.sin().sum() * w.shape[0])(x)
    w.add_(1)
    shape.backward()
    with pytest.raises(MutationError, match="was changed in place since the forward"):
        y.backward()
