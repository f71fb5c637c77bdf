"""checkpoint in plain eager code: what torch's own does, and then what it does not."""

import functools
import gc
import queue
import weakref

import pytest
import torch
from support import Changing, Counter, Storages, assert_same
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointError,
    GraphExecGroup,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import funcckpt
from funcckpt.errors import MutationError, OptionError

from .implementations import D, both, draw, leaf, plain


def chain(x, w):
    for _ in range(3):
        x = torch.tanh(x @ w)
    return x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


def inner_backward(x, w):
    y = (x @ w).sin()
    (g,) = torch.autograd.grad(y.cos().sum(), x)
    return x.cos() * g


def inner_leaf(x):
    inner = x.detach().requires_grad_()
    (inner.sin() ** 2).sum().backward()
    return x.sin() * inner.grad


def in_containers(pair, *, scale, more):
    a, b = pair
    return (a @ b["w"] * scale).sin() * more[0]


def storing(call, x, w):
    kept = []

    def f(x):
        kept.append((x @ w).sin())
        return kept[-1].exp()

    y = call(f, x)
    return y + kept[0]


def state_that_f_replaces(call, x, w):
    """Whose graph leads from call to call. Under `remat` it would have to be returned."""
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 3, dtype=D)
    cell.h = x @ w

    def step(x):
        cell.h = cell(x, cell.h)
        return cell.h * 2

    return call(step, call(step, call(step, x)))


PROGRAMS = {
    "chain": lambda call, x, w: call(chain, x, w),
    "containers": lambda call, x, w: call(in_containers, (x, {"w": w}), scale=w[0], more=[x, "no tensor"]),
    "a custom function": lambda call, x, w: call(lambda x: Square.apply(x.sin() @ w), x),
    "an inner backward": lambda call, x, w: call(inner_backward, x, w),
    "a backward inside of what f has made": lambda call, x, w: call(inner_leaf, x @ w),
    "no input that requires grad": lambda call, x, w: call(lambda x: (x @ w).sin(), x.detach()),
    "no gradient at all": lambda call, x, w: x @ w + call(torch.sin, x.detach()),
    "a stored tensor": storing,
    "a state": state_that_f_replaces,
    "a parameter that f makes": lambda call, x, w: call(
        lambda x: nn.functional.linear(x, nn.Parameter(torch.eye(3, dtype=D) * 2)).sin(), x @ w
    ),
    "a frozen parameter that f makes": lambda call, x, w: call(
        lambda x: nn.functional.linear(x, nn.Parameter(torch.eye(3, dtype=D) * 2, False)).sin(), x @ w
    ),
}
OPTIONS = [{}, {"early_stop": False}, {"debug": True}, {"determinism_check": "none"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_without(program, options):
    def run(call):
        torch.manual_seed(0)
        x, w = leaf(3, 3), leaf(3, 3)
        y = PROGRAMS[program](call, x, w)
        grad = functools.partial(torch.autograd.grad, y.sum(), [x, w], materialize_grads=True)
        return y.detach(), grad(retain_graph=True), grad()

    without = lambda f, *args, **kwargs: f(*args, **kwargs)
    assert_same(run(functools.partial(funcckpt.checkpoint, **options)), run(without))


@both
def test_how_often_f_is_run(checkpoint):
    f, after, x = Counter(torch.sin), Counter(lambda x: x + 1), leaf(3)
    with torch.no_grad():
        assert not checkpoint(f, x).requires_grad
    assert f.calls == 1
    y = checkpoint(f, x).sum()
    for calls in (3, 4):
        torch.autograd.grad(y, x, retain_graph=True)
        assert f.calls == calls

    def calls(**options):
        after.reset()
        checkpoint(lambda x: after(x.sin()), x, **options).sum().backward()
        return after.calls

    assert calls() == 1
    assert calls(early_stop=False) == 2
    with set_checkpoint_early_stop(False):
        assert calls() == calls(early_stop=True) == 2
    with set_checkpoint_early_stop(True):
        assert calls(early_stop=False) == 1


# -- what is kept -----------------------------------------------------------------------------------


@both
def test_only_the_inputs_are_kept(checkpoint):
    x, w = leaf(64, 32), leaf(32, 32)
    with Storages().known(x, w) as storages:
        y = checkpoint(chain, checkpoint(chain, checkpoint(chain, x, w), w), w)
        assert storages.live == 3 * y.nbytes
        y.sum().backward(retain_graph=True)
        x.grad = w.grad = None
        gc.collect()
        assert storages.live == 3 * y.nbytes

        def outer(x):
            return checkpoint(chain, checkpoint(chain, x.exp(), w).exp(), w)

        del y
        y = checkpoint(outer, x)
        assert storages.live == y.nbytes


@pytest.mark.parametrize("nested", [False, True])
def test_partial_backwards_leave_nothing(nested):
    """Of torch's, each leaves what it has recomputed and not read. So does a look at a saved tensor."""
    x = leaf(64)

    def f(x):
        return x.sin().sin().sin().exp(), x.cos().cos().cos()

    def g(x):
        return funcckpt.checkpoint(f, x.exp())

    with Storages().known(x) as storages:
        a, b = funcckpt.checkpoint(g if nested else f, x)
        before = storages.live
        for _ in range(3):
            torch.autograd.grad(a.sum(), x, retain_graph=True)
            gc.collect()
            assert storages.live == before
            assert torch.equal(a.grad_fn._saved_result, a)
            gc.collect()
            assert storages.live == before
        assert_same(torch.autograd.grad(b.sum(), x), torch.autograd.grad((g if nested else f)(x)[1].sum(), x))


@both
@pytest.mark.parametrize("retain_graph", [False, True])
def test_recomputed_tensors_are_freed_as_they_are_used(checkpoint, retain_graph):
    x = leaf(64)
    made, alive = [], []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, i):
            ctx.i = i
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            alive.append((ctx.i, sum(ref() is not None for ref in made)))
            return g, None

    def f(x):
        for i in range(4):
            x = Look.apply(x, i)
            made.append(weakref.ref(x.untyped_storage()))
            x = x.sin()
        return x

    y = checkpoint(f, x)
    made.clear()
    y.sum().backward(retain_graph=retain_graph)
    assert len(made) == 4 and alive == [(3, 3), (2, 2), (1, 1), (0, 0)]


class Nested:
    def __init__(self, checkpoint, depth):
        self.entered = [queue.SimpleQueue() for _ in range(depth)]  # which are not put back
        self.checkpoint = checkpoint

    def f(self, x, level=0):
        self.entered[level].put(None)
        x = x.sin()
        if level + 1 < len(self.entered):
            x = self.checkpoint(self.f, x, level + 1)
        return x.sin()


@both
def test_nested_recomputes_only_what_is_asked_for(checkpoint):
    x, nested = leaf(3), Nested(checkpoint, 3)
    checkpoint(nested.f, x).sum().backward()
    # The last tensor is saved by the outermost; to read what the inner ones have saved, each of them
    # is run in each recomputation around it, and once more on its own behalf.
    assert [entered.qsize() for entered in nested.entered] == [2, 3, 4]
    assert_same(x.grad, torch.autograd.grad(Nested(plain, 3).f(x).sum(), x)[0])


@both
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_left_behind(checkpoint, backward):
    h = leaf(3) * 2
    ref = weakref.ref(h)
    y = checkpoint(lambda a: (a * 2).sin(), h)
    del h
    assert ref() is not None
    if backward:
        y.sum().backward()
    else:
        del y
    assert ref() is None


# -- random numbers, hooks, errors ------------------------------------------------------------------


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_of_other_devices(other_device, preserve):
    x = leaf(4)
    y = funcckpt.checkpoint(lambda x: (x * draw(x)).sin(), x, preserve_rng_state=preserve)
    end, scale = other_device.get_state(), torch.rand(4, dtype=D, generator=torch.Generator().manual_seed(5))
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, (scale * (x * scale).cos()).detach()) == preserve
    assert torch.equal(other_device.get_state(), end) == preserve


@both
def test_saved_tensor_read_twice_is_an_error(checkpoint):
    class Twice(Square):
        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    with pytest.raises(CheckpointError, match="already unpacked once"):
        checkpoint(lambda x: Twice.apply(x.exp()), leaf(3)).sum().backward()


@both
@pytest.mark.parametrize(
    ("bodies", "says"),
    [
        ((lambda x: x.sin().sin(), torch.sin), "A different number of tensors was saved"),
        ((torch.sin, lambda x: x.sin().sin()), r"trying to save more|different number"),
        ((torch.sin, lambda x: x[:2].sin()), "have different metadata"),
    ],
    ids=["fewer", "more", "shape"],
)
def test_other_saved_tensors_are_an_error(checkpoint, bodies, says):
    with pytest.raises(CheckpointError, match=says):
        checkpoint(Changing(*bodies), leaf(3), early_stop=False).sum().backward()


@both
def test_the_check_of_shapes_can_be_switched_off(checkpoint):
    f = Changing(lambda x: x.sin().sum(), lambda x: x[:2].sin().sum())
    with pytest.raises(RuntimeError) as error:
        checkpoint(f, leaf(3), determinism_check="none").backward()
    assert not isinstance(error.value, CheckpointError)
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        checkpoint(torch.sin, leaf(3), determinism_check="sometimes")


@both
def test_debug_lists_the_operators_of_both_runs(checkpoint):
    def listed():
        f = Changing(lambda x: x.sin().exp(), lambda x: x.cos()[:2].exp())
        with pytest.raises(CheckpointError) as error:
            checkpoint(f, leaf(3), debug=True).sum().backward()
        return str(error.value)

    forward, recompute = listed().split("Operations executed during recomputation")
    assert "aten.sin.default" in forward.split("Operations executed during the original forward")[1]
    assert "aten.cos.default" in recompute and "aten.sin.default" not in recompute
    with set_checkpoint_debug_enabled(False):
        assert "aten.sin.default" not in listed()


@both
def test_graph_exec_group(checkpoint):
    f, x = Counter(lambda x: (x.sin().exp(), x.cos().exp())), leaf(3)
    a, b = checkpoint(f, x)
    with GraphExecGroup():
        (ga,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
        (gb,) = torch.autograd.grad(b.sum(), x, retain_graph=True)
        assert f.calls == 2
        with pytest.raises(CheckpointError, match="overlap"):
            torch.autograd.grad(b.sum(), x)
    assert_same(ga + gb, (x.cos() * x.sin().exp() - x.sin() * x.cos().exp()).detach())


# -- the curried form, which torch has from 2.14 on, and use_reentrant=True -------------------------


def test_curried():
    f = Counter(lambda x, debug, use_reentrant: x.sin() * debug * use_reentrant)
    g = funcckpt.checkpoint(early_stop=False, use_reentrant=False)(f)
    x = leaf(3)
    g(x, debug=2, use_reentrant=3).sum().backward()
    assert_same(x.grad, 6 * x.detach().cos())
    assert f.calls == 2

    class Model:
        scale = 2.0

        @funcckpt.checkpoint(preserve_rng_state=False)
        def forward(self, x):
            """Words."""
            return x.sin() * self.scale

    assert Model.forward.__doc__ == "Words." and Model.forward.__name__ == "forward"
    assert_same(torch.autograd.grad(Model().forward(x).sum(), x)[0], 2 * x.detach().cos())
    layer = nn.Linear(3, 3, dtype=D)
    y = funcckpt.checkpoint()(layer)(x)
    assert_same(torch.autograd.grad(y.sum(), layer.weight), torch.autograd.grad(layer(x).sum(), layer.weight))
    with pytest.raises(OptionError, match="lr"):
        funcckpt.checkpoint(lr=3)


def test_reentrant_is_served_like_the_other():
    x, w = leaf(4, 3), leaf(3, 3)
    funcckpt.eager.checkpoint._warn_of_reentrant.cache_clear()
    with pytest.warns(UserWarning, match="use_reentrant=True like use_reentrant=False") as seen:
        y = funcckpt.checkpoint(chain, x, w, use_reentrant=True)
    assert [warning.filename for warning in seen] == [__file__]
    assert_same(y, chain(x, w))
    # Once, and also where torch's raises.
    y = funcckpt.checkpoint(lambda x, *, w: x @ w, x, w=w, use_reentrant=True)
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad((x @ w).sum(), x))


# -- what torch's checkpoint gets wrong without a word --------------------------------------------


@pytest.mark.parametrize("how", ["list", "keyword"])
def test_a_tensor_inside_of_an_argument_that_was_changed(how):
    w, x = leaf(3), torch.ones(3, dtype=D)
    if how == "list":
        y = funcckpt.checkpoint(lambda xs: (xs[0] * w).sin(), [x])
    else:
        y = funcckpt.checkpoint(lambda *, x: (x * w).sin(), x=x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_saved_tensor_that_f_overwrites():
    def f(x):
        y = x.sin()
        z = y * y
        y.mul_(2)
        return z.exp()

    with pytest.raises(MutationError, match=r"x\.clone\(\)"):
        funcckpt.checkpoint(f, leaf(3)).sum().backward()


# -- traced -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["compiled", "decorated", "make_fx"])
def test_in_one_graph(how):
    def body(x, w, *, scale=2):
        return torch.tanh(x @ w).sin() * scale

    curried = funcckpt.checkpoint(preserve_rng_state=False)(body)

    def loss(x, w):
        return (curried(x, w) if how == "decorated" else funcckpt.checkpoint(body, x, w, scale=2)).sum()

    x, w = leaf(4, 3), leaf(3, 3)
    expected = list(torch.autograd.grad(body(x, w).sum(), [x, w]))
    if how == "make_fx":
        graph = make_fx(lambda x, w: torch.autograd.grad(loss(x, w), [x, w]))(x, w)
        assert_same([g.detach() for g in graph(x, w)], expected)
        assert sum("tanh.default" in str(node.target) for node in graph.graph.nodes) == 2  # forward and again
    else:
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        assert_same(list(torch.autograd.grad(compiled(x, w), [x, w])), expected)
