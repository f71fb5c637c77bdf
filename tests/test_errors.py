"""Errors say what, where and how out; and after an error everything is as it was."""

import gc
import itertools
import re
import threading
import types

import pytest
import torch
from oracles import F64, FORWARD, REVERSE, assert_same, compare, of_one, plain, state, tensor, total
from torch import nn

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

LOOK = r"float64\[3\]|\(3,\).*float64"


def assert_says(error, *patterns):
    """Each pattern occurs in the message, which is a sentence or more."""
    text = str(error)
    for pattern in patterns:
        assert re.search(pattern, text), f"no {pattern!r} in: {text}"
    assert len(text) > 40, text


@pytest.mark.parametrize(
    "kind", [CheckpointError, ClosureError, MutationError, InputError, OutputError, EscapeError]
)
def test_all_are_funcckpt_errors_and_runtime_errors(kind):
    assert issubclass(kind, FuncckptError) and issubclass(kind, RuntimeError)
    assert issubclass(kind, TypeError) == (kind in (InputError, OutputError))


# ---------------------------------------------------------------- InputError and OutputError


def generates(x):
    yield x


async def awaits(x):
    return x


class GeneratingModule(nn.Module):
    def forward(self, x):
        yield x


@pytest.mark.parametrize("thing", [3, [torch.sin], torch.ones(2)], ids=["int", "list", "tensor"])
def test_f_is_not_callable(thing):
    with pytest.raises(InputError) as caught:
        remat(thing)
    assert_says(caught.value, "remat", type(thing).__name__, "callable")


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (generates, "generates"),
        (awaits, "awaits"),
        (GeneratingModule(), "GeneratingModule"),
        (lambda x: (g for g in [x]), "lambda"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_f_gives_a_generator_or_coroutine(f, name):
    with pytest.raises(OutputError) as caught:
        remat(f)(tensor(3, requires_grad=True))
    assert_says(caught.value, name, "generator|coroutine", "list|tuple|return")
    del caught
    gc.collect()  # A coroutine for which nobody has waited warns as it goes.


@pytest.mark.parametrize("items", [lambda x: iter([x]), lambda x: (v for v in [x]), lambda x: [iter([x])]])
def test_argument_can_be_used_only_once(items):
    def consumes(x, items):
        return x.sum()

    for call in (lambda x: remat(consumes)(x, items(x)), lambda x: remat(consumes)(x, items=items(x))):
        for transform in (lambda f, x: f(x.requires_grad_()), REVERSE["vmap_grad"]):
            with pytest.raises(InputError) as caught:
                transform(call, tensor(3))
            assert_says(caught.value, "consumes", "iterator|generator", "list|tuple")
    assert_says(caught.value, "items")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"determinism_check": "sometimes"}, ("default", "none", "values", "sometimes")),
        ({"determinism_check": True}, ("True",)),
        ({"static_argnums": 1.5}, ("int",)),
        ({"static_argnums": (0, "x")}, ("int",)),
        ({"static_argnames": ("a", 3)}, ("str",)),
    ],
    ids=str,
)
def test_bad_option(options, words):
    for make in (lambda: remat(torch.sin, **options), lambda: remat(**options)):
        with pytest.raises(InputError) as caught:
            make()
        assert_says(caught.value, "remat", *options, *words)


class Box:
    def __init__(self, content):
        self.content = content


BOXES = {
    "object": Box,
    "object_in_list": lambda y: [1, {"a": Box([y])}],
    "set": lambda y: {y},
    "function": lambda y: lambda: y,
}


@pytest.mark.parametrize("transform", ["backward", "vmap_grad"])
@pytest.mark.parametrize("kind", BOXES)
def test_output_hides_a_tensor(kind, transform):
    def boxes(x):
        return x.sum(), BOXES[kind](x.sin())

    with pytest.raises(OutputError) as caught:
        REVERSE[transform](lambda x: remat(boxes)(x)[0], tensor(3))
    assert_says(caught.value, "boxes", LOOK, "register|tuple|dict|list")


def test_output_objects_without_tensors_pass():
    def f(x):
        return x.sin(), Box(3), {1, 2}, torch.sin

    x = tensor(3, requires_grad=True)
    y, number, numbers, function = remat(f)(x)
    y.sum().backward()
    assert (number.content, numbers, function) == (3, {1, 2}, torch.sin)
    assert_same(x.grad, x.cos())


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


def stores_in_global():
    def stores(x):
        global ESCAPED
        ESCAPED = x.sin()
        return ESCAPED * x

    return stores, lambda: ESCAPED


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
    registry = type("Registry", (), {"table": {"calls": 1}})

    def stores(x):
        registry.table["h"] = x.sin()
        return registry.table["h"] * x

    return stores, lambda: registry.table["h"]


def stores_its_input():
    items = []

    def stores(x):
        items.append(x)
        return x.sin()

    return stores, lambda: items[0]


STORES = {
    "dict": stored(lambda o, h: o.table.update(h=h), lambda o: o.table["h"]),
    "list in a list": stored(lambda o, h: o.items.append([h]), lambda o: o.items[0][0]),
    "new object": stored(lambda o, h: setattr(o, "kept", Box(h)), lambda o: o.kept.content),
    "closure": stored(lambda o, h: setattr(o, "kept", lambda: h), lambda o: o.kept()),
    "global": stores_in_global,
    "beside its parameter": stores_beside_its_parameter,
    "table of a class": stores_in_table_of_class,
    "its input": stores_its_input,
}


@pytest.mark.parametrize("transform", ["backward", "grad_grad", "vmap", "jvp", "vmap_grad", "jacrev"])
@pytest.mark.parametrize("place", STORES)
def test_stored_tensor_is_right_or_named(place, transform):
    """The loss uses what f stored: without remat it has a gradient."""
    global ESCAPED

    def run(wrap):
        def loss(x):
            f, fetch = STORES[place]()
            return total(wrap(f)(x)) + total(fetch()) * 3

        return (REVERSE | FORWARD)[transform](loss, tensor(3))

    try:
        error = compare(run, remat, allowed=(EscapeError,))
    finally:
        ESCAPED = None
    if error is not None:
        assert_says(error, "[sS]tores", LOOK, "return|detach")


@pytest.mark.parametrize("transform", ["backward", "vmap_grad"])
def test_stored_numbers_and_detached_tensors_are_fine(transform):
    def run(wrap):
        log = []

        def f(x):
            h = x.sin()
            log.append(h.detach() if transform == "backward" else tuple(x.shape))
            return h * x

        return REVERSE[transform](wrap(f), tensor(3)), log[0]

    assert_same(run(remat), run(plain))


# ---------------------------------------------------------------- ClosureError, MutationError: the words


def hidden(w):
    """Gives w; nothing that a search of Python objects can see through."""
    return iter(lambda: w, None).__next__


@pytest.mark.parametrize(
    ("transform", "word"),
    [("grad_x", "grad"), ("jvp_x", "jvp|tangent"), ("vmap_x", "vmap|batched"), ("backward", "requires grad")],
)
def test_closure_error_has_all_the_words(transform, word):
    def run(wrap):
        def call(w):
            fetch = hidden(w)

            def hidden_user(x):
                return torch.tanh(fetch() * x)

            return wrap(hidden_user)(tensor(3, seed=1))

        return of_one(transform)(call, tensor(3))

    error = compare(run, remat, allowed=(ClosureError,))
    if error is not None:
        assert_says(error, "hidden_user", word, LOOK, "argument")


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = [tensor(2, 3)]

    def forward(self, x):
        return (x * self.table[0]).sin()


def test_mutation_errors_have_all_the_words():
    running, model = tensor(3), Table()

    def writes(batch, *, scale):
        scale.mul_(2)
        return batch * scale

    def updates(x):
        running.add_(1)
        return x * running

    def changed_later(x):
        y = remat(model)(x).sum()
        model.table[0].zero_()
        y.backward()

    for run, words in (
        (lambda x: remat(writes)(x, scale=tensor(2, 3)), ("writes", "scale", r"float64\[2, 3\]", "in place")),
        (remat(updates), ("updates", "running", r"float64\[3\]", "in place")),
        (changed_later, ("Table", "table", r"float64\[2, 3\]", "between|after")),
    ):
        with pytest.raises(MutationError) as caught:
            run(tensor(3, requires_grad=True))
        assert_says(caught.value, *words, "clone|copy|return|buffer|argument")


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


RUNS = {
    **REVERSE,
    **FORWARD,
    "nested_remat": lambda f, x: REVERSE["grad"](remat(lambda x: remat(f)(x) * 2), x),
}
AGAIN = [name for name in RUNS if name not in FORWARD]


def run_seeded(transform, f):
    torch.manual_seed(21)
    return RUNS[transform](f, tensor(3))


def without_streams():
    return {key: value for key, value in state().items() if key != "random stream"}


@pytest.mark.parametrize("error", [Boom, BaseBoom])
@pytest.mark.parametrize(
    ("transform", "at"),
    [*[(name, 1) for name in RUNS], *[(name, 2) for name in AGAIN]],
    ids=lambda v: v if isinstance(v, str) else {1: "forward", 2: "recomputation"}[v],
)
def test_error_inside_f_leaves_the_state_intact(transform, at, error):
    run_seeded(transform, remat(Fuse(0)))  # whatever torch sets up at the first use
    want = run_seeded(transform, remat(Fuse(0)))
    after = torch.rand(3)
    before, fuse = without_streams(), Fuse(at, error)
    with pytest.raises(error, match="in f"):
        run_seeded(transform, remat(fuse))
    stream = torch.rand(3)
    assert fuse.local.runs == at
    assert without_streams() == before
    if at == 1:  # as without remat: f has drawn until it failed
        with pytest.raises(error):
            run_seeded(transform, Fuse(1, error))
        after = torch.rand(3)
    # Recomputing has drawn nothing, whether or not it came to an end.
    assert_same(stream, after)
    fuse.at = 0
    assert_same(run_seeded(transform, remat(fuse)), want)


@pytest.mark.parametrize("transform", RUNS)
def test_torch_error_in_f_is_torchs_error(transform):
    """The type and text of an error are those without remat, and a traceback leads into f."""

    def wrong_shapes(x):
        return x @ torch.ones(7, 7, dtype=F64)

    def text(wrap):
        with pytest.raises(RuntimeError) as caught:
            RUNS[transform](wrap(wrong_shapes), tensor(3))
        assert not isinstance(caught.value, FuncckptError)
        assert any(entry.name == "wrong_shapes" for entry in caught.traceback)
        return str(caught.value).splitlines()[0]

    assert text(remat) == text(plain)


@pytest.mark.parametrize("kind", ["closure", "mutation", "escape", "output", "checkpoint"])
@pytest.mark.parametrize("transform", ["backward", "vmap_grad", "grad_grad"])
def test_own_errors_leave_the_state_intact(kind, transform):
    kept, fetch, runs = [], hidden(tensor(3, requires_grad=True)), itertools.count()

    def writes(x):
        torch.rand(2)
        x.add_(1)
        return x.sin()

    f = {
        "closure": lambda x: torch.tanh(fetch() * x),
        "mutation": writes,
        "escape": lambda x: (kept.append(x.sin()), x.sin())[1],
        "output": lambda x: (x.sin(), Box(x.cos())),
        "checkpoint": lambda x: x.sin()[:1] if next(runs) else x.sin(),
    }[kind]
    before = without_streams()
    try:
        REVERSE[transform](lambda x: remat(f)(x * 1), tensor(3))
    except RuntimeError:
        pass
    else:
        assert kind in ("closure", "escape")  # those may be right instead
    assert without_streams() == before
    good = lambda x: torch.tanh(x) * x
    assert_same(REVERSE[transform](remat(good), tensor(3)), REVERSE[transform](good, tensor(3)))


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
