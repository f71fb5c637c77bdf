"""Errors say what, where and how out; and after an error everything is as it was."""

import functools
import gc
import itertools
import re
import threading
import weakref
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import pytest
import torch
from oracles import F64, FORWARD, REVERSE, assert_same, compare, of_one, plain, state, tensor, total
from support import Sine
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, vjp, vmap

from funcckpt import CheckpointError, ClosureError, EscapeError, FuncckptError, checkpoint, remat
from funcckpt.errors import InputError, MutationError, OutputError

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


class Box:
    def __init__(self, content):
        self.content = content


def generates(x):
    yield x


async def awaits(x):
    return x


class GeneratingModule(nn.Module):
    def forward(self, x):
        yield x


def consumes(x, items):
    return x.sum()


def boxes(box):
    def boxes(x):
        return x.sum(), box(x.sin())

    return lambda x: remat(boxes)(x)[0]


def fills(d):
    d["y"] = d["x"].sin()
    return d


def writes(batch, *, scale):
    scale.mul_(2)
    return batch * scale


def updates(running):
    def updates(x):
        running.add_(1)
        return x * running

    return remat(updates)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = [tensor(2, 3)]

    def forward(self, x):
        return (x * self.table[0]).sin()


def changed_later(x):
    model = Table()
    y = remat(model)(x).sum()
    model.table[0].zero_()
    return y


def option(*words, **options):
    """The error of an option names it."""
    return InputError, ("remat", *options, *words), lambda x: remat(torch.sin, **options)


LATE = "generator|coroutine", "list|tuple|return"
ONCE = "consumes", "iterator|generator", "list|tuple"
HIDES = "boxes", LOOK, "register|tuple|dict|list"
INSTEAD = "in place", "clone|copy|return|buffer|argument"
WRONG = {
    "int": (InputError, ("remat", "int", "callable"), lambda x: remat(3)),
    "class": (InputError, ("its class", r"remat\(Tanh\(...\)\)\(x\)"), lambda x: remat(nn.Tanh)),
    "class called": (InputError, ("its class", r"checkpoint\(Tanh\(...\), x\)"), lambda x: checkpoint(nn.Tanh, x)),
    "check": option("default", "none", "values", "sometimes", determinism_check="sometimes"),
    "check of a decorator": (InputError, ("sometimes",), lambda x: remat(determinism_check="sometimes")),
    "generator": (OutputError, ("generates", *LATE), remat(generates)),
    "coroutine": (OutputError, ("awaits", *LATE), remat(awaits)),
    "generating module": (OutputError, ("GeneratingModule", *LATE), remat(GeneratingModule())),
    "generator expression": (OutputError, ("lambda", *LATE), remat(lambda x: (g for g in [x]))),
    "iterator": (InputError, ONCE, lambda x: remat(consumes)(x, iter([x]))),
    "iterator in a list": (InputError, (*ONCE, "items"), lambda x: remat(consumes)(x, items=[iter([x])])),
    "generator given": (InputError, (*ONCE, "items"), lambda x: remat(consumes)(x, items=(v for v in [x]))),
    "object": (OutputError, HIDES, boxes(Box)),
    "object in a list": (OutputError, HIDES, boxes(lambda y: [1, {"a": Box([y])}])),
    "function": (OutputError, HIDES, boxes(lambda y: lambda: y)),
    "view of a dict": (OutputError, HIDES, boxes(lambda y: {"a": y}.values())),
    "list of a class": (OutputError, HIDES, boxes(lambda y: type("List", (list,), {})([[y]]))),
    "numbers in an object, under a transform": (
        OutputError, ("boxes", r"int64\[\]", "outlive", "register"),
        lambda x: x.sum() * torch.func.grad(lambda z: boxes(lambda y: Box(y.argmax()))(z))(tensor(3)).sum(),
    ),
    "dict that is filled": (
        MutationError, ("fills", "a list or dict among", "copy", r"f\(dict\(d\)\)"),
        lambda x: remat(fills)({"x": x})["y"].sum(),
    ),
    "argument written to": (
        MutationError, ("writes", "scale", r"float64\[3, 3\]", *INSTEAD),
        lambda x: remat(writes)(x, scale=tensor(3, 3)).sum(),
    ),
    "captured tensor written to": (
        MutationError, ("updates", "running", LOOK, *INSTEAD), lambda x: updates(tensor(3))(x).sum()
    ),
    "changed later": (
        MutationError, ("Table", "table", r"float64\[2, 3\]", "between|after", INSTEAD[1]), changed_later
    ),
    "not the same again": (
        CheckpointError, (LOOK, r"\[1\]"),
        lambda x: remat(lambda x, runs=itertools.count(): x.sin()[: 1 if next(runs) else 3])(x).sum(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("views", [False, True])
def test_a_backward_that_calls_vjp(views):
    """Torch itself fails so inside of torch.func.vjp, and not inside of grad."""

    class ByVjp(Sine):
        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return vjp(torch.sin, x.view_as(x) if views else x)[1](cotangent)

    run = lambda wrap: vmap(grad(lambda x: wrap(ByVjp.apply)(x) * 2))(tensor(3))
    if views:
        assert_same(run(remat), run(plain))
    else:
        with pytest.raises(RuntimeError):
            vmap(lambda x: vjp(ByVjp.apply, x)[1](x))(tensor(3))
        with pytest.raises(CheckpointError) as raised:
            run(remat)
        assert_says(raised.value, r"\w+\.apply", r"vjp", r"x\.view_as\(x\)")


def test_hooks_on_what_a_node_has_saved():
    """On the tensors that are kept they act as on any node; the last one must stay as it is."""

    def gradient(which):
        x = tensor(3, requires_grad=True)
        y = remat(torch.sin)(x)
        for saved in y.grad_fn._raw_saved_tensors[which]:
            saved.register_hooks(torch.clone, lambda t: 2 * t)
        return torch.autograd.grad(y.sum(), x)

    assert_same(gradient(slice(1)), ((2 * tensor(3)).cos(),))
    with pytest.raises(CheckpointError, match="exchanged the last saved tensor"):
        gradient(slice(None))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    rows = [tensor(3, 4), tensor(5, 4)]

    def gradient(wrap, layout):
        leaves = [x.clone().requires_grad_() for x in rows]
        x = torch.nested.as_nested_tensor(leaves, layout=layout)
        return torch.autograd.grad(
            total(wrap(lambda x: torch.nested.to_padded_tensor(x.sin(), 0))(x)), leaves
        )

    assert_same(gradient(remat, torch.jagged), gradient(plain, torch.jagged))
    by_hooks = lambda f: functools.partial(checkpoint, f)
    assert_same(gradient(by_hooks, torch.jagged), gradient(plain, torch.jagged))
    with pytest.raises(InputError) as caught:
        gradient(remat, torch.strided)
    assert_says(caught.value, "nested", "strided", "jagged", "checkpoint")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("transform", ["backward", "vmap_grad"])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_has_all_the_words_and_leaves_the_state_intact(wrong, transform):
    kind, words, f = WRONG[wrong]
    before = without_streams()
    with pytest.raises(kind) as caught:
        REVERSE[transform](f, tensor(3))
    if wrong != "changed later" or transform == "backward":  # else torch's error, which knows no names
        assert_says(caught.value, *words)
    assert without_streams() == before
    del caught
    gc.collect()  # A coroutine for which nobody has waited warns as it goes.


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_with_a_torch_function_under_a_transform():
    """It would not be called."""
    x = tensor(3).as_subclass(Logged)
    times = remat(lambda w, x: (w * x).sum())
    with pytest.raises(InputError) as caught:
        grad(lambda w: times(w, x))(tensor(3))
    assert_says(caught.value, "argument", "Logged", "__torch_function__", "as_subclass", "without remat")
    assert_same(times(tensor(3), x), (tensor(3) * x).sum())


def test_a_hidden_dual_tensor():
    """Plain forward mode sees f as it is."""
    with forward_ad.dual_level():
        hidden = weakref.ref(dual := forward_ad.make_dual(tensor(3), tensor(3)))
        x = tensor(3, requires_grad=True)
        _, tangent = forward_ad.unpack_dual(remat(lambda x: x * hidden())(x))
        assert_same(tangent, x * dual)


def test_output_objects_without_tensors_pass():
    def f(x):
        return x.sin(), Box(3), {1, 2}, torch.sin

    x = tensor(3, requires_grad=True)
    y, number, numbers, function = remat(f)(x)
    y.sum().backward()
    assert (number.content, numbers, function) == (3, {1, 2}, torch.sin)
    assert_same(x.grad, x.cos())


class Beside(nn.Module):
    """Stores by a name that a parameter's name begins with, as hooks that compute weights do."""

    def __init__(self):
        super().__init__()
        self.scale_raw = nn.Parameter(tensor(3))

    def store(self, h):
        self.scale = self.scale_raw.exp() * h


ESCAPED = None


# As a library collects what its modules compute.
COLLECTING = ContextVar("collecting")
exec("def collect(h): active.get().append(h)", library := {"__name__": "numpy.any", "active": COLLECTING})
collect = library.pop("collect")


# Where f stores a tensor: what makes the place, what writes there, and what reads.
STORES = {
    "list in a list": (list, lambda o, h: o.append([h]), lambda o: o[0][0]),
    "new object": (lambda: Box(0), lambda o, h: setattr(o, "content", Box(h)), lambda o: o.content.content),
    "closure": (lambda: Box(0), lambda o, h: setattr(o, "content", lambda: h), lambda o: o.content()),
    "context variable of a library": (
        lambda: COLLECTING.set([]) and None, lambda o, h: collect(h), lambda o: COLLECTING.get()[0],
    ),
    "global": (int, lambda o, h: None, lambda o: ESCAPED),
    "thread": (threading.local, lambda o, h: setattr(o, "losses", [h]), lambda o: o.losses[0]),
    "detached in a thread": (threading.local, lambda o, h: setattr(o, "h", h.detach()), lambda o: o.h),
    "weak keys": (WeakKeyDictionary, lambda o, h: o.setdefault(Box, [h]), lambda o: o[Box][0]),
    "class": (lambda: type("Kept", (), {"h": 0}), lambda o, h: setattr(o, "h", h.detach()), lambda o: o.h),
    "beside its parameter": (Beside, Beside.store, lambda o: o.scale),
    "table of a class": (
        lambda: type("Registry", (), {"table": {"calls": 1}}), lambda o, h: o.table.update(h=h),
        lambda o: o.table["h"],
    ),
}  # fmt: skip


SOME = "backward", "grad_grad", "vmap", "jvp", "vmap_grad", "jacrev"
STORED = [(place, transform) for place in [*STORES, "its input", "detached"] for transform in SOME]


@pytest.mark.parametrize(("place", "transform"), STORED)
def test_stored_tensor_is_right_or_named(place, transform):
    """The loss uses what f stored: without remat it has a gradient."""
    make, write, read = STORES.get(place) or (list, list.append, lambda o: o[0])

    def run(wrap):
        def loss(x):
            global ESCAPED
            o, ESCAPED = make(), None

            def stores(x):
                global ESCAPED
                h = x.sin()
                if place == "global":
                    ESCAPED = h  # which nothing here reads
                write(o, {"its input": x, "detached": h.detach()}.get(place, h))
                return h * x

            return total(wrap(stores)(x)) + total(read(o)) * 3

        return (REVERSE | FORWARD)[transform](loss, tensor(3))

    error = compare(run, remat, allowed=(EscapeError,))
    if error is not None:
        assert "detached" not in place
        assert_says(error, "[sS]tores", LOOK, "return|detach")


def test_what_is_stored_too_deep_is_named():
    def run(w):
        stored = []

        def f(x):
            inner = (w,)
            for _ in range(24):
                inner = (inner,)
            stored.append(inner)
            return (x * w).sum()

        return remat(f)(torch.ones(3, dtype=F64))

    with pytest.raises(EscapeError) as caught:
        grad(run)(tensor(3))
    assert_says(caught.value, "stored", LOOK, "Return it")


def test_escape_error_says_by_which_method():
    stored = {}

    class Model:
        def cost(self, x):
            stored["cost"] = (x * x).sum()
            return stored["cost"]

    model = Model()
    with pytest.raises(EscapeError) as caught:
        grad(remat(lambda x: model.cost(x)))(tensor(3))
    assert_says(caught.value, "item 'cost' of closure variable 'stored' of attribute 'cost'")
    assert "object at" not in str(caught.value)


def test_closure_error_has_all_the_words():
    def call(w):
        fetch = iter(lambda: w, None).__next__  # through which no search of Python objects can see

        def hidden_user(x):
            return torch.tanh(fetch() * x)

        return remat(hidden_user)(tensor(3, seed=1))

    with pytest.raises(ClosureError) as caught:
        of_one("grad_x")(call, tensor(3))
    assert_says(caught.value, "hidden_user", "grad", LOOK, "argument")


Boom, BaseBoom = ArithmeticError, GeneratorExit  # which nothing else raises here


class Fuse:
    """Random, under its own modes, and raises in the run with the number `at`."""

    def __init__(self, at, error=Boom):
        self.at, self.error = at, error
        self.runs = itertools.count(1)  # which no recomputation puts back

    def __call__(self, x):
        run = next(self.runs)
        y = x * torch.randn(3, dtype=F64)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.rand(2)
        with torch.enable_grad():
            z = torch.tanh(y)
            if run == self.at:
                with torch.autocast("cpu", torch.float16), torch.device("cpu"):
                    raise self.error("in f")
        return z * x


NESTED = {"nested_remat": lambda f, x: REVERSE["grad"](remat(lambda x: remat(f)(x) * 2), x)}
RUNS = REVERSE | NESTED | FORWARD
RAISING = [(name, 1) for name in RUNS] + [(name, 2) for name in REVERSE | NESTED]


def run_seeded(transform, f):
    torch.manual_seed(21)
    return RUNS[transform](f, tensor(3))


def without_streams():
    return {key: value for key, value in state().items() if key != "random stream"}


@pytest.mark.parametrize("error", [Boom, BaseBoom])
@pytest.mark.parametrize(("transform", "at"), RAISING)
def test_error_inside_f_leaves_the_state_intact(transform, at, error):
    run_seeded(transform, remat(Fuse(0)))  # whatever torch sets up at the first use
    want = run_seeded(transform, remat(Fuse(0)))
    after = torch.rand(3)
    before, fuse = without_streams(), Fuse(at, error)
    with pytest.raises(error, match="in f"):
        run_seeded(transform, remat(fuse))
    stream = torch.rand(3)
    assert next(fuse.runs) == at + 1
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


def test_arguments_of_f_are_not_arguments_of_remat():
    with pytest.raises(InputError, match=r"Write remat\(f\)\(x\), or checkpoint\(f, x\)"):
        remat(torch.sin, torch.ones(2))


CACHE = torch.zeros(3, dtype=F64)


def test_a_write_to_a_captured_tensor_under_a_transform_names_it():
    def f(x, y):
        CACHE.copy_(x.detach())
        return x * y * CACHE

    with pytest.raises(MutationError) as caught:
        grad(lambda x: remat(f)(x, x * 2).sum())(tensor(3))
    assert_says(caught.value, r"remat\(", r"captured \(global 'CACHE'\)", "return the new value")


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda *args: checkpoint(f, *args)])
def test_a_wrapper_that_inference_mode_has_made(wrap):
    """An argument at a level of vmap, which `grad` inside of it does not lift."""
    block = lambda w, x: (x @ w).sin()
    w, xs = tensor(3, 3), tensor(4, 3)
    run = lambda b: vmap(lambda x: grad(lambda w: b(w, x).sum())(w))(xs)
    with torch.inference_mode():
        found, expected = run(wrap(block)), run(block)
    assert_same(found.clone(), expected.clone())
