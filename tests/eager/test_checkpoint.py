"""checkpoint in plain eager code: what torch's own does, and then what it does not."""

import gc
import queue
import weakref

import pytest
import torch
from support import Changing, Counter, Storages, assert_same
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    GraphExecGroup,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import funcckpt
from funcckpt.errors import MutationError, OptionError

from .implementations import D, both, draw, gradients, leaf


def chain(x, w):
    for _ in range(3):
        x = torch.tanh(x @ w)
    return x


@both
def test_only_the_inputs_are_kept(checkpoint):
    x, w = leaf(64, 32), leaf(32, 32)
    with Storages().known(x, w) as storages:
        y = checkpoint(chain, x, w)
        assert storages.live == y.nbytes
        plain = chain(x, w)
        assert storages.live >= y.nbytes + 3 * plain.nbytes


@both
def test_keyword_and_nested_arguments(checkpoint):
    def f(pair, *, scale, more):
        a, b = pair
        return (a * b["w"] * scale).sin() * more[0]

    def run(call):
        torch.manual_seed(1)
        a, w, scale, m = leaf(3), leaf(3), leaf(3), leaf(3)
        y = call(f, (a, {"w": w}), scale=scale, more=[m, "no tensor"])
        y.sum().backward()
        return [y.detach(), a.grad, w.grad, scale.grad, m.grad]

    assert_same(run(checkpoint), run(lambda f, *args, **kwargs: f(*args, **kwargs)))


@both
def test_no_input_that_requires_grad(checkpoint):
    w = leaf(3)
    checkpoint(lambda x: (x * w).sin(), torch.ones(3, dtype=D)).sum().backward()
    assert_same(w.grad, w.detach().cos())
    assert not checkpoint(torch.sin, torch.ones(3)).requires_grad


@both
def test_without_grad_mode_f_is_just_called(checkpoint):
    f = Counter(torch.sin)
    with torch.no_grad():
        assert not checkpoint(f, leaf(2)).requires_grad
    assert f.calls == 1


@both
def test_inner_backward_that_frees_its_graph(checkpoint):
    def f(x):
        y = x.sin()
        (g,) = torch.autograd.grad(y.cos().sum(), x)
        return x.cos() * g

    x = leaf(3)
    for early_stop in (True, False):
        assert_same(gradients(f, x, checkpoint=checkpoint, early_stop=early_stop), gradients(f, x))


@both
def test_several_backwards_recompute_each_time(checkpoint):
    f = Counter(chain)
    x, w = leaf(4, 3), leaf(3, 3)
    y = checkpoint(f, x, w).sum()
    once = torch.autograd.grad(y, [x, w], retain_graph=True)
    assert f.calls == 2
    assert_same(torch.autograd.grad(y, [x, w], retain_graph=True), once)
    assert f.calls == 3


@both
def test_retain_graph_keeps_no_recomputed_tensors(checkpoint):
    x, w = leaf(64, 32), leaf(32, 32)
    with Storages().known(x, w) as storages:
        y = checkpoint(chain, x, w)
        before = storages.live
        y.backward(torch.ones_like(y), retain_graph=True)
        x.grad = w.grad = None
        gc.collect()
        assert storages.live == before


@pytest.mark.parametrize("nested", [False, True])
def test_partial_backwards_leave_nothing(nested):
    """Of torch's, each leaves what it has recomputed and not read."""
    x = leaf(64)

    def f(x):
        return x.sin().sin().sin(), x.cos().cos().cos()

    def g(x):
        return funcckpt.checkpoint(f, x.exp())

    with Storages().known(x) as storages:
        a, b = funcckpt.checkpoint(g if nested else f, x)
        before = storages.live
        for _ in range(3):
            torch.autograd.grad(a.sum(), x, retain_graph=True)
            gc.collect()
            assert storages.live == before
        assert_same(torch.autograd.grad(b.sum(), x), torch.autograd.grad((g if nested else f)(x)[1].sum(), x))


def test_looking_at_a_saved_tensor_leaves_nothing():
    x = leaf(64)
    with Storages().known(x) as storages:
        y = funcckpt.checkpoint(lambda x: x.sin().sin().sin().exp(), x)
        before = storages.live
        for _ in range(3):
            assert torch.equal(y.grad_fn._saved_result, y)
        gc.collect()
        assert storages.live == before
    y.sum().backward()


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


@both
def test_peak_of_a_chain_of_checkpoints(checkpoint):
    x = leaf(64)
    n, scalars = x.nbytes, 16

    def block(x):
        return x.sin().sin().sin().sin()

    def peak(call):
        with Storages().known(x) as storages:
            y = x
            for _ in range(8):
                y = call(block, y)
            y.sum().backward()
        x.grad = None
        return storages.peak

    assert peak(lambda f, x: f(x)) == 34 * n + scalars
    assert peak(checkpoint) <= 14 * n + scalars  # eight inputs, the inside of one, gradients


class Nested:
    def __init__(self, checkpoint, depth):
        self.entered = [queue.SimpleQueue() for _ in range(depth)]  # which are not put back
        self.checkpoint = checkpoint

    @property
    def counts(self):
        return [entered.qsize() for entered in self.entered]

    def f(self, x, level=0):
        self.entered[level].put(None)
        x = x.sin()
        if level + 1 < len(self.entered):
            x = self.checkpoint(self.f, x, level + 1)
        return x.sin()


@both
def test_nested_recomputes_only_what_is_asked_for(checkpoint):
    x = leaf(3)
    nested = Nested(checkpoint, 3)
    checkpoint(nested.f, x).sum().backward()
    # The last tensor is saved by the outermost; to read what the inner ones have saved, each of them
    # is run in each recomputation around it, and once more on its own behalf.
    assert nested.counts == [2, 3, 4]
    plain = Nested(lambda f, *args: f(*args), 3)
    assert_same(x.grad, torch.autograd.grad(plain.f(x).sum(), x)[0])


@both
def test_nested_inputs_are_not_kept(checkpoint):
    x = leaf(64)

    def inner(h):
        return h.sin().sin()

    def outer(x):
        return checkpoint(inner, checkpoint(inner, x.exp()).exp())

    with Storages().known(x) as storages:
        y = checkpoint(outer, x)
        assert storages.live == y.nbytes


@both
def test_early_stop(checkpoint):
    after = Counter(lambda x: x + 1)

    def f(x):
        return after(x.sin())

    def calls(**options):
        after.reset()
        checkpoint(f, leaf(3), **options).sum().backward()
        return after.calls

    assert calls() == 1
    assert calls(early_stop=False) == 2
    with set_checkpoint_early_stop(False):
        assert calls() == 2
        assert calls(early_stop=True) == 2
    with set_checkpoint_early_stop(True):
        assert calls(early_stop=False) == 1


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_of_other_devices(other_device, preserve):
    x = leaf(4)
    y = funcckpt.checkpoint(lambda x: (x * draw(x)).sin(), x, preserve_rng_state=preserve)
    end, scale = other_device.get_state(), torch.rand(4, dtype=D, generator=torch.Generator().manual_seed(5))
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, (scale * (x * scale).cos()).detach()) == preserve
    assert torch.equal(other_device.get_state(), end) == preserve


@both
def test_preserve_rng_state_false_draws_anew(checkpoint):
    torch.manual_seed(0)
    x = torch.ones(64, dtype=D, requires_grad=True)
    y = checkpoint(lambda x: x * torch.rand_like(x), x, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(y.detach(), x.grad)


@both
def test_saved_tensor_read_twice_is_an_error(checkpoint):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, g):
            (a,) = ctx.saved_tensors
            (b,) = ctx.saved_tensors
            return g * (a + b) / 2

    with pytest.raises(CheckpointError, match="already unpacked once"):
        checkpoint(Twice.apply, leaf(3)).sum().backward()


@both
def test_custom_function_and_its_hooks(checkpoint):
    calls = []
    x = leaf(3)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * g

    def f(x):
        y = Double.apply(x.sin())
        y.register_hook(lambda g: calls.append(1))
        return y

    checkpoint(f, x).sum().backward()
    assert_same(x.grad, (2 * x.sin() * x.cos()).detach())
    assert calls == [1]


@both
def test_leaf_hooks_run_once(checkpoint):
    calls = []
    w = leaf(3)
    w.register_hook(lambda g: calls.append(1))
    w.register_post_accumulate_grad_hook(lambda w: calls.append(2))
    checkpoint(lambda x: x * w, leaf(3)).sum().backward()
    assert calls == [1, 2]


@both
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Changing(lambda x: x.sin().sin(), torch.sin), "A different number of tensors was saved"),
        (Changing(torch.sin, lambda x: x.sin().sin()), r"trying to save more|different number"),
        (Changing(torch.sin, lambda x: x[:2].sin()), "have different metadata"),
    ],
    ids=["fewer", "more", "shape"],
)
def test_other_saved_tensors_are_an_error(checkpoint, other, says):
    f = Changing(*other.bodies)
    with pytest.raises(CheckpointError, match=says):
        checkpoint(f, leaf(3), early_stop=False).sum().backward()


@both
def test_the_check_of_shapes_can_be_switched_off(checkpoint):
    f = Changing(lambda x: x.sin().sum(), lambda x: x[:2].sin().sum())
    with pytest.raises(RuntimeError) as error:
        checkpoint(f, leaf(3), determinism_check="none").backward()
    assert not isinstance(error.value, CheckpointError)


@both
def test_debug_lists_the_operators_of_both_runs(checkpoint):
    def listed():
        f = Changing(lambda x: x.sin().exp(), lambda x: x.cos()[:2].exp())
        with pytest.raises(CheckpointError) as error:
            checkpoint(f, leaf(3), debug=True).sum().backward()
        return str(error.value)

    text = listed()
    forward, recompute = text.split("Operations executed during recomputation")
    assert "aten.sin.default" in forward.split("Operations executed during the original forward")[1]
    assert "aten.cos.default" in recompute and "aten.sin.default" not in recompute
    with set_checkpoint_debug_enabled(False):
        assert "aten.sin.default" not in listed()


@both
def test_unknown_determinism_check(checkpoint):
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        checkpoint(torch.sin, leaf(3), determinism_check="sometimes")


class Noting:
    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def __enter__(self):
        self.notes.append(self.name)

    def __exit__(self, *exception):
        pass


@both
def test_context_fn(checkpoint):
    notes = []
    y = checkpoint(
        torch.sin, leaf(3), context_fn=lambda: (Noting(notes, "forward"), Noting(notes, "recompute"))
    )
    assert notes == ["forward"]
    y.sum().backward()
    assert notes == ["forward", "recompute"]


@both
def test_graph_exec_group(checkpoint):
    f = Counter(lambda x: (x.sin().exp(), x.cos().exp()))
    x = leaf(3)
    a, b = checkpoint(f, x)
    with GraphExecGroup():
        (ga,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
        (gb,) = torch.autograd.grad(b.sum(), x, retain_graph=True)
        assert f.calls == 2
        with pytest.raises(CheckpointError, match="overlap"):
            torch.autograd.grad(b.sum(), x)
    assert_same(ga + gb, (x.cos() * x.sin().exp() - x.sin() * x.cos().exp()).detach())
    with pytest.raises(RuntimeError, match="cannot be nested"), GraphExecGroup(), GraphExecGroup():
        pass


@both
def test_nothing_is_left_behind(checkpoint):
    x = leaf(3)
    h = x * 2
    ref = weakref.ref(h)
    y = checkpoint(lambda a, b: (a * b).sin(), x, h)
    del h
    assert ref() is not None
    y.sum().backward()
    assert ref() is None


@both
def test_dropped_before_the_backward(checkpoint):
    h = leaf(3) * 2
    ref = weakref.ref(h)
    y = checkpoint(lambda a: a.sin(), h)
    del h, y
    assert ref() is None


def test_hooks_around_that_hand_out_copies():
    """The copy of an input that was written to before has another version than the input had."""
    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        z = funcckpt.checkpoint(lambda x: x.sin().exp() * x, x.exp().mul_(2))
    y = x.exp() * 2
    assert_same(torch.autograd.grad(z.sum(), x), torch.autograd.grad((y.sin().exp() * y).sum(), x))


@both
def test_function_that_stores_its_intermediates(checkpoint):
    kept = []

    def f(x):
        y = x.sin()
        kept.append(y)
        return y.exp()

    x = leaf(3)
    y = checkpoint(f, x)
    (g,) = torch.autograd.grad((y.sum() + kept[0].sum()), x)
    assert_same(g, (x.cos() * x.sin().exp() + x.cos()).detach())


# -- the curried form, which torch has from 2.14 on ----------------------------------------------


def test_curried():
    f = Counter(lambda x, debug, use_reentrant: x.sin() * debug * use_reentrant)
    g = funcckpt.checkpoint(early_stop=False, use_reentrant=False)(f)
    x = leaf(3)
    g(x, debug=2, use_reentrant=3).sum().backward()
    assert_same(x.grad, 6 * x.detach().cos())
    assert f.calls == 2
    g = funcckpt.checkpoint()(torch.sin)
    assert_same(torch.autograd.grad(g(x).sum(), x)[0], x.detach().cos())


def test_decorator_of_functions_and_methods():
    @funcckpt.checkpoint()
    def f(x):
        """Words."""
        return x.sin()

    class Model:
        scale = 2.0

        @funcckpt.checkpoint(preserve_rng_state=False)
        def forward(self, x):
            return x.sin() * self.scale

    assert f.__doc__ == "Words." and f.__name__ == "f"
    x = leaf(3)
    assert_same(torch.autograd.grad(f(x).sum(), x)[0], x.detach().cos())
    assert_same(torch.autograd.grad(Model().forward(x).sum(), x)[0], 2 * x.detach().cos())


def test_decorated_module():
    layer = nn.Linear(3, 3, dtype=D)
    x = leaf(2, 3)
    y = funcckpt.checkpoint()(layer)(x)
    assert_same(torch.autograd.grad(y.sum(), layer.weight), torch.autograd.grad(layer(x).sum(), layer.weight))


def test_what_is_no_function():
    with pytest.raises(OptionError, match="lr"):
        funcckpt.checkpoint(lr=3)


# -- use_reentrant=True ----------------------------------------------------------------------------


def test_reentrant_is_served_like_the_other():
    x, w = leaf(4, 3), leaf(3, 3)
    expected = gradients(chain, x, w)
    funcckpt.eager.checkpoint._warn_of_reentrant.cache_clear()
    with pytest.warns(UserWarning, match="use_reentrant=True like use_reentrant=False") as seen:
        y = funcckpt.checkpoint(chain, x, w, use_reentrant=True)
    assert [warning.filename for warning in seen] == [__file__]
    assert_same(y, chain(x, w))
    # Once, and also where torch's raises.
    y = funcckpt.checkpoint(lambda x, *, w: x @ w, x, w=w, use_reentrant=True)
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad((x @ w).sum(), x))
    assert_same(gradients(chain, x, w, checkpoint=funcckpt.checkpoint, use_reentrant=None), expected)


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

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        f(leaf(3)).sum().backward()
    with pytest.raises(MutationError, match=r"x\.clone\(\)"):
        funcckpt.checkpoint(f, leaf(3)).sum().backward()


def test_torchs_type_of_error_catches_ours():
    assert issubclass(funcckpt.CheckpointError, CheckpointError)


# -- compiled -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decorated", [False, True])
def test_compiled_in_one_graph(decorated):
    def body(x, w, *, scale):
        return torch.tanh(x @ w).sin() * scale

    curried = funcckpt.checkpoint(preserve_rng_state=False)(body)

    def loss(x, w):
        if decorated:
            return curried(x, w, scale=2).sum()
        return funcckpt.checkpoint(body, x, w, scale=2).sum()

    x, w = leaf(4, 3), leaf(3, 3)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_same(
        list(torch.autograd.grad(compiled(x, w), [x, w])),
        list(torch.autograd.grad(body(x, w, scale=2).sum(), [x, w])),
    )


def test_traced_by_make_fx():
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradients(x, w):
        return torch.autograd.grad(funcckpt.checkpoint(chain, x, w).sum(), [x, w])

    x, w = leaf(4, 3), leaf(3, 3)
    graph = make_fx(gradients)(x, w)
    assert_same([g.detach() for g in graph(x, w)], list(torch.autograd.grad(chain(x, w).sum(), [x, w])))
    assert sum("tanh.default" in str(node.target) for node in graph.graph.nodes) >= 5  # forward and again
