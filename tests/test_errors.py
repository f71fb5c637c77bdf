"""Errors say what, where and how out; and after an error everything is as it was."""

import asyncio
import gc
import itertools
import re
import threading
import types

import pytest
import torch
from oracles import F64, assert_same, compare, plain, state, tensor, total, weight
from test_mutation import FORWARD, REVERSE
from torch import nn
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from funcckpt import (
    CheckpointError,
    ClosureError,
    EscapeError,
    FuncckptError,
    InputError,
    MutationError,
    OutputError,
    checkpoint,
    remat,
)


def assert_says(error, *patterns):
    """Each pattern occurs in the message, which is a sentence or more."""
    text = str(error)
    for pattern in patterns:
        assert re.search(pattern, text), f"no {pattern!r} in: {text}"
    assert len(text) > 40, text


# ---------------------------------------------------------------- the types


@pytest.mark.parametrize(
    "kind", [CheckpointError, ClosureError, MutationError, InputError, OutputError, EscapeError]
)
def test_all_are_funcckpt_errors_and_runtime_errors(kind):
    assert issubclass(kind, FuncckptError) and issubclass(kind, RuntimeError)
    assert issubclass(kind, TypeError) == (kind in (InputError, OutputError))


# ---------------------------------------------------------------- InputError: f


def generates(x):
    yield x


async def awaits(x):
    return x


async def generates_and_awaits(x):
    yield x


class GeneratingModule(nn.Module):
    def forward(self, x):
        yield x


class AwaitingObject:
    async def __call__(self, x):
        return x


@pytest.mark.parametrize("thing", [3, "f", [torch.sin], torch.ones(2)], ids=["int", "str", "list", "tensor"])
def test_f_is_not_callable(thing):
    with pytest.raises(InputError) as caught:
        remat(thing)
    assert_says(caught.value, "remat", type(thing).__name__, "callable")


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (generates, "generates"),
        (awaits, "awaits"),
        (generates_and_awaits, "generates_and_awaits"),
        (GeneratingModule(), "GeneratingModule"),
        (AwaitingObject(), "AwaitingObject"),
        (GeneratingModule().forward, "GeneratingModule.forward"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_f_is_a_generator_or_coroutine_function(f, name):
    with pytest.raises(OutputError) as caught:
        remat(f)(tensor(3, requires_grad=True))
    assert_says(caught.value, name, "generator|coroutine", "list|tuple|return")
    del caught
    gc.collect()  # A coroutine for which nobody has waited warns as it goes.


def test_f_gives_a_coroutine_or_generator():
    """A lambda hides what the function it calls is."""
    for f in (lambda x: generates(x), lambda x: (g for g in [x])):
        with pytest.raises((OutputError, InputError)) as caught:
            remat(f)(tensor(3, requires_grad=True))
        assert_says(caught.value, "lambda", "generator", "list|tuple")

    coroutines = []

    def make(x):
        coroutines.append(awaits(x))
        return coroutines[-1]

    with pytest.raises((OutputError, InputError), match="coroutine"):
        remat(make)(tensor(3, requires_grad=True))
    for coroutine in coroutines:
        asyncio.run(coroutine)


# ---------------------------------------------------------------- InputError: arguments and options


ITERATORS = {
    "iterator": lambda x: iter([x]),
    "generator": lambda x: (v for v in [x]),
    "in_a_list": lambda x: [iter([x])],
}


@pytest.mark.parametrize("transform", ["eager", "grad", "vmap"])
@pytest.mark.parametrize("kind", ITERATORS)
def test_argument_can_be_used_only_once(kind, transform):
    def consumes(x, items):
        return x.sum()

    def call(x):
        return remat(consumes)(x, ITERATORS[kind](x))

    with pytest.raises(InputError) as caught:
        {
            "eager": lambda: call(tensor(3, requires_grad=True)),
            "grad": lambda: grad(call)(tensor(3)),
            "vmap": lambda: vmap(call)(tensor(2, 3)),
        }[transform]()
    assert_says(caught.value, "consumes", "iterator|generator", "list|tuple")


def test_iterator_given_by_keyword_is_named():
    def consumes(x, items):
        return x.sum()

    with pytest.raises(InputError) as caught:
        remat(consumes)(tensor(3, requires_grad=True), items=iter([1]))
    assert_says(caught.value, "consumes", "items")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"determinism_check": "sometimes"},
            ("determinism_check", "default", "none", "values", "sometimes"),
        ),
        ({"determinism_check": None}, ("determinism_check", "None")),
        ({"determinism_check": True}, ("determinism_check", "True")),
        ({"static_argnums": "x"}, ("static_argnums", "int")),
        ({"static_argnums": 1.5}, ("static_argnums", "int")),
        ({"static_argnums": (0, "x")}, ("static_argnums", "int")),
        ({"static_argnames": 3}, ("static_argnames", "str")),
        ({"static_argnames": ("a", 3)}, ("static_argnames", "str")),
    ],
    ids=str,
)
def test_bad_option(options, words):
    for make in (lambda: remat(torch.sin, **options), lambda: remat(**options)):
        with pytest.raises(InputError) as caught:
            make()
        assert_says(caught.value, "remat", *words)


# ---------------------------------------------------------------- OutputError


class Box:
    def __init__(self, content):
        self.content = content


class SlottedBox:
    __slots__ = ("content",)

    def __init__(self, content):
        self.content = content


BOXES = {
    "object": Box,
    "slots": SlottedBox,
    "list_in_object": lambda y: Box([y]),
    "object_in_list": lambda y: [1, {"a": Box(y)}],
    "set": lambda y: {y},
    "function": lambda y: lambda: y,
}


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
@pytest.mark.parametrize("kind", BOXES)
def test_output_hides_a_tensor(kind, transform):
    def boxes(x):
        return x.sum(), BOXES[kind](x.sin())

    loss = lambda x: remat(boxes)(x)[0]
    x = tensor(3)
    with pytest.raises(OutputError) as caught:
        {
            "backward": lambda: loss(x.requires_grad_()),
            "grad": lambda: grad(loss)(x),
            "jvp": lambda: jvp(loss, (x,), (x,)),
            "vmap": lambda: vmap(loss)(torch.stack([x, x])),
            "vmap_grad": lambda: vmap(grad(loss))(torch.stack([x, x])),
        }[transform]()
    assert_says(caught.value, "boxes", r"float64\[3\]|\(3,\).*float64", "register|tuple|dict|list")


def test_output_objects_without_tensors_pass():
    def f(x):
        return x.sin(), Box(3), Box("text"), {1, 2}, torch.sin

    x = tensor(3, requires_grad=True)
    y, number, text, numbers, function = remat(f)(x)
    y.sum().backward()
    assert (number.content, text.content, numbers, function) == (3, "text", {1, 2}, torch.sin)
    torch.testing.assert_close(x.grad, x.detach().cos())


# ---------------------------------------------------------------- EscapeError


ESCAPED = None


def stored(write, read):
    """A function that stores a tensor in an object, and what fetches it there."""

    def make():
        place = types.SimpleNamespace(items=[], table={}, kept=None)

        def stores(x):
            h = x.sin()
            write(place, h)
            return h * x

        return stores, lambda: read(place)

    return make


def stores_in_nonlocal():
    kept = None

    def stores(x):
        nonlocal kept
        kept = x.sin()
        return kept * x

    return stores, lambda: kept


def stores_in_global():
    def stores(x):
        global ESCAPED
        ESCAPED = x.sin()
        return ESCAPED * x

    return stores, lambda: ESCAPED


def stores_in_module():
    class Stores(nn.Module):
        def forward(self, x):
            self.hidden = x.sin()
            return self.hidden * x

    module = Stores()
    return module, lambda: module.hidden


def stores_beside_its_parameter():
    """By a name that a parameter's name begins with, as hooks that compute weights do."""

    class Stores(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale_raw = nn.Parameter(tensor(3))

        def forward(self, x):
            self.scale = self.scale_raw.exp() * x
            return self.scale * x

    module = Stores()
    return module, lambda: module.scale


def stores_in_table_of_class():
    class Registry:
        pass

    Registry.table = {"calls": 1}

    def stores(x):
        Registry.table["h"] = x.sin()
        return Registry.table["h"] * x

    return stores, lambda: Registry.table["h"]


def stores_its_input():
    items = []

    def stores(x):
        items.append(x)
        return x.sin()

    return stores, lambda: items[0]


STORES = {
    "list": stored(lambda o, h: o.items.append(h), lambda o: o.items[0]),
    "dict": stored(lambda o, h: o.table.update(h=h), lambda o: o.table["h"]),
    "attribute": stored(lambda o, h: setattr(o, "kept", h), lambda o: o.kept),
    "list in a list": stored(lambda o, h: o.items.append([h]), lambda o: o.items[0][0]),
    "new dict": stored(lambda o, h: setattr(o, "kept", {"h": h}), lambda o: o.kept["h"]),
    "new object": stored(lambda o, h: setattr(o, "kept", Box(h)), lambda o: o.kept.content),
    "closure": stored(lambda o, h: setattr(o, "kept", lambda: h), lambda o: o.kept()),
    "nonlocal": stores_in_nonlocal,
    "global": stores_in_global,
    "module": stores_in_module,
    "beside its parameter": stores_beside_its_parameter,
    "table of a class": stores_in_table_of_class,
    "its input": stores_its_input,
}
LOSSES = {
    name: {**REVERSE, **FORWARD}[name]
    for name in ("backward", "grad", "grad_grad", "vmap", "jvp", "vmap_grad")
}
LOSSES["jacrev"] = lambda loss, x: jacrev(loss)(x)


@pytest.mark.parametrize("transform", LOSSES)
@pytest.mark.parametrize("place", STORES)
def test_stored_tensor_is_right_or_named(place, transform):
    """The loss uses what f stored: without remat it has a gradient."""
    global ESCAPED

    def run(wrap):
        def loss(x):
            f, fetch = STORES[place]()
            y = wrap(f)(x)
            return total(y) + total(fetch()) * 3

        return LOSSES[transform](loss, tensor(3))

    try:
        error = compare(run, remat, allowed=(EscapeError,))
    finally:
        ESCAPED = None
    if error is not None:
        assert_says(error, "[sS]tores", r"float64\[3\]|\(3,\).*float64", "return|detach")


@pytest.mark.parametrize("transform", LOSSES)
def test_stored_numbers_are_fine(transform):
    """A log of Python numbers, a counter: nothing that could have a gradient."""

    def run(wrap):
        log = []
        counter = 0

        def f(x):
            nonlocal counter
            counter += 1
            log.append(tuple(x.shape))
            return x.sin() * x

        out = LOSSES[transform](lambda x: total(wrap(f)(x)), tensor(3))
        return out, log[0], log[-1], counter > 0

    assert_same(run(remat), run(plain))


def test_stored_detached_tensor_is_fine_in_plain_eager():
    def run(wrap):
        log = []

        def f(x):
            h = x.sin()
            log.append(h.detach())
            return h * x

        x = tensor(3, requires_grad=True)
        total(wrap(f)(x)).backward()
        return x.grad, log[0]

    assert_same(run(remat), run(plain))


# ---------------------------------------------------------------- ClosureError, MutationError,
# CheckpointError: the words


class Opaque:
    """Nothing that a search of Python objects can see through."""

    def __init__(self, w):
        self.fetch = iter(lambda: w, None).__next__


def uses_hidden(fetch):
    def hidden_user(x):
        return torch.tanh(fetch() * x)

    return hidden_user


HIDDEN_UNDER = {
    "grad": (lambda call, w, x: grad(lambda w: total(call(w, x)))(w), "grad"),
    "jvp": (lambda call, w, x: jvp(lambda w: call(w, x), (w,), (w,)), "jvp|tangent"),
    "vmap": (lambda call, w, x: vmap(lambda w: call(w, x))(torch.stack([w, w])), "vmap|batched"),
    "backward": (
        lambda call, w, x: total(call(w.clone().requires_grad_(), x)).backward(),
        "requires grad",
    ),
}


@pytest.mark.parametrize("transform", HIDDEN_UNDER)
def test_closure_error_has_all_the_words(transform):
    run, word = HIDDEN_UNDER[transform]

    def call(wrap):
        def inner(w, x):
            source = Opaque(w)
            return wrap(uses_hidden(source.fetch))(x)

        return inner

    want = run(call(plain), tensor(3), tensor(3, seed=1))
    try:
        got = run(call(remat), tensor(3), tensor(3, seed=1))
    except ClosureError as error:
        assert_says(error, "hidden_user", word, r"float64\[3\]|\(3,\).*float64", "argument")
    else:
        if want is not None:
            assert_same(got, want)


def test_mutation_error_has_all_the_words():
    def writes(batch, *, scale):
        scale.mul_(2)
        return batch * scale

    with pytest.raises(MutationError) as caught:
        remat(writes)(tensor(3, requires_grad=True), scale=tensor(2, 3))
    assert_says(caught.value, "writes", "scale", r"float64\[2, 3\]", "in place", "clone|copy|return")

    running = tensor(3)

    def updates(x):
        running.add_(1)
        return x * running

    with pytest.raises(MutationError) as caught:
        remat(updates)(tensor(3, requires_grad=True))
    assert_says(caught.value, "updates", "running", r"float64\[3\]", "in place", "clone|copy|return|buffer")


def test_changed_constant_has_all_the_words():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = [tensor(2, 3)]

        def forward(self, x):
            return (x * self.table[0]).sin()

    model = Model()
    y = remat(model)(tensor(3, requires_grad=True)).sum()
    model.table[0].zero_()
    with pytest.raises(MutationError) as caught:
        y.backward()
    assert_says(caught.value, "Model", "table", r"float64\[2, 3\]", "between|after", "clone|copy|argument")


def test_checkpoint_error_has_all_the_words():
    lengths = itertools.chain([3, 2])

    def shrinks(x):
        return x[: next(lengths)].sin()

    y = remat(shrinks)(tensor(3, requires_grad=True)).sum()
    with pytest.raises(CheckpointError) as caught:
        y.backward()
    assert_says(
        caught.value,
        "shrinks",
        r"float64\[3\]",
        r"float64\[2\]",
        "determinism_check",
        "forward",
        "recomput",
    )


# ---------------------------------------------------------------- errors of f itself


class Boom(Exception):
    pass


class BaseBoom(BaseException):
    pass


class Fuse:
    """Random, under its own modes, and raises in the run with the number `at`."""

    def __init__(self, at, error=Boom):
        self.at, self.error = at, error
        # A place that no recomputation puts back.
        self.local = threading.local()
        self.local.runs = 0

    def __call__(self, x):
        self.local.runs += 1
        y = x * torch.randn(3, dtype=F64)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.rand(2)
        with torch.enable_grad():
            z = torch.tanh(y)
            if self.local.runs == self.at:
                with torch.autocast("cpu", torch.float16), torch.device("cpu"):
                    raise self.error("in f")
        return z * x


def _later(f, x):
    y, pull = vjp(f, x)
    return pull(weight(y))


def _forward_mode(f, x):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(x, x)).clone()


# The transform, and how often f runs in it at least.
RUNS = {
    "eager": (lambda f, x: f(x), 1),
    "backward": (lambda f, x: total(f(x.clone().requires_grad_())).backward(), 2),
    "double_backward": (
        lambda f, x: torch.autograd.grad(
            total(torch.autograd.grad(total(f(leaf := x.clone().requires_grad_())), leaf, create_graph=True)),
            leaf,
        ),
        2,
    ),
    "grad": (lambda f, x: grad(lambda x: total(f(x)))(x), 2),
    "vjp": (_later, 2),
    "vmap": (lambda f, x: vmap(f, randomness="different")(torch.stack([x, x])), 1),
    "vmap_same": (lambda f, x: vmap(f, randomness="same")(torch.stack([x, x])), 1),
    "jvp": (lambda f, x: jvp(f, (x,), (x,)), 1),
    "forward_mode": (_forward_mode, 1),
    "vmap_grad": (
        lambda f, x: vmap(grad(lambda x: total(f(x))), randomness="different")(torch.stack([x, x])),
        2,
    ),
    "grad_vmap": (
        lambda f, x: grad(lambda x: total(vmap(f, randomness="different")(x)))(torch.stack([x, x])),
        2,
    ),
    "grad_grad": (lambda f, x: grad(lambda x: total(grad(lambda x: total(f(x)))(x)))(x), 2),
    "jacrev": (lambda f, x: jacrev(f)(x), 2),
    "jacfwd": (lambda f, x: jacfwd(f, randomness="same")(x), 1),
    "hessian": (lambda f, x: jacfwd(jacrev(lambda x: total(f(x))), randomness="same")(x), 2),
    "nested_remat": (lambda f, x: grad(lambda x: total(remat(lambda x: remat(f)(x) * 2)(x)))(x), 2),
}


@pytest.mark.parametrize("error", [Boom, BaseBoom])
@pytest.mark.parametrize(
    ("transform", "at"),
    [(name, at) for name, (_, runs) in RUNS.items() for at in range(1, runs + 1)],
    ids=lambda v: v if isinstance(v, str) else {1: "forward", 2: "recomputation"}[v],
)
def test_error_inside_f_leaves_the_state_intact(transform, at, error):
    run = RUNS[transform][0]
    x = tensor(3)
    torch.manual_seed(21)
    run(remat(Fuse(0)), x)  # whatever torch sets up at the first use
    torch.manual_seed(21)
    want = run(remat(Fuse(0)), x)

    before = state()
    fuse = Fuse(at, error)
    torch.manual_seed(21)
    with pytest.raises(error, match="in f"):
        run(remat(fuse), x)
    assert fuse.local.runs == at
    after = state()
    assert {k: v for k, v in after.items() if "random" not in k} == {
        k: v for k, v in before.items() if "random" not in k
    }
    assert after["python random"] == before["python random"]

    fuse.at = 0
    torch.manual_seed(21)
    assert_same(run(remat(fuse), x), want)


@pytest.mark.parametrize("transform", RUNS)
def test_random_stream_after_an_error_in_the_forward(transform):
    """As without remat: f has drawn until it failed."""
    run = RUNS[transform][0]

    def after(wrap):
        torch.manual_seed(21)
        with pytest.raises(Boom):
            run(wrap(Fuse(1)), tensor(3))
        return torch.rand(3, dtype=F64)

    assert_same(after(remat), after(plain))


@pytest.mark.parametrize("transform", [name for name, (_, runs) in RUNS.items() if runs > 1])
def test_random_stream_after_an_error_in_the_recomputation(transform):
    """Recomputing has drawn nothing, whether or not it came to an end."""
    run = RUNS[transform][0]

    def after(wrap, at):
        torch.manual_seed(21)
        try:
            run(wrap(Fuse(at)), tensor(3))
        except Boom:
            assert at == 2
        else:
            assert at == 0
        return torch.rand(3, dtype=F64)

    assert_same(after(remat, 2), after(plain, 0))


@pytest.mark.parametrize("transform", RUNS)
def test_torch_error_in_f_is_torchs_error(transform):
    """The type and text of an error are those without remat, and a traceback leads into f."""

    def wrong_shapes(x):
        return x @ torch.ones(7, 7, dtype=F64)

    def text(wrap):
        with pytest.raises(RuntimeError) as caught:
            RUNS[transform][0](wrap(wrong_shapes), tensor(3))
        assert not isinstance(caught.value, FuncckptError)
        assert any(entry.name == "wrong_shapes" for entry in caught.traceback)
        return str(caught.value).splitlines()[0]

    assert text(remat) == text(plain)


@pytest.mark.parametrize("kind", ["closure", "mutation", "escape", "output", "checkpoint"])
@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad", "grad_grad"])
def test_own_errors_leave_the_state_intact(kind, transform):
    run = RUNS[transform][0]
    x = tensor(3)
    hidden = tensor(3, requires_grad=True)
    kept = []
    source = Opaque(hidden)
    runs = itertools.count()  # which no recomputation puts back

    def writes(x):
        torch.rand(2)
        x.add_(1)
        return x.sin()

    def changes(x):
        return x.sin()[:1] if next(runs) else x.sin()

    f = {
        "closure": lambda x: torch.tanh(source.fetch() * x),
        "mutation": writes,
        "escape": lambda x: (kept.append(x.sin()), x.sin())[1],
        "output": lambda x: (x.sin(), Box(x.cos()))[0:2],
        "checkpoint": changes,
    }[kind]
    before = state()
    try:
        run(lambda x: remat(f)(x * 1), x)
    except RuntimeError:
        pass
    else:
        assert kind in ("closure", "escape")  # those may be right instead
    after = state()
    assert {k: v for k, v in after.items() if "random" not in k} == {
        k: v for k, v in before.items() if "random" not in k
    }
    good = lambda x: torch.tanh(x) * x
    assert_same(run(remat(good), x), run(good, x))


@pytest.mark.parametrize("call", [lambda f, x: remat(f)(x), checkpoint])
def test_a_class_is_as_it_was_left_after_an_error_in_the_recomputation(call):
    class Shelf:
        k = 2.0

    runs = itertools.count()  # which no recomputation puts back

    def f(x):
        if next(runs):
            raise Boom(Shelf.k)
        return (x * Shelf.k).sin()

    y = call(f, tensor(3, requires_grad=True)).sum()
    Shelf.k = 5.0
    with pytest.raises(Boom, match=r"2\.0"):
        y.backward()
    assert Shelf.k == 5.0
