"""checkpoint in plain eager code: what torch's own does, and then what it does not."""

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import Changing, Counter, Storages, assert_same
from torch import nn
from torch.utils.checkpoint import CheckpointError, GraphExecGroup, set_checkpoint_early_stop

import funcckpt
from funcckpt import world
from funcckpt.errors import MutationError, OptionError

from .implementations import D, leaf


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


def in_containers(pair, *, scale, more):
    a, b = pair
    return (a @ b["w"] * scale).sin() * more[0]


PROGRAMS = {
    "chain": lambda call, x, w: call(chain, x, w),
    "containers": lambda call, x, w: call(in_containers, (x, {"w": w}), scale=w[0], more=[x, "no tensor"]),
    "a custom function": lambda call, x, w: call(lambda x: Square.apply(x.sin() @ w), x),
    "no gradient at all": lambda call, x, w: x @ w + call(torch.sin, x.detach()),
    "a parameter that f makes": lambda call, x, w: call(
        lambda x: nn.functional.linear(x, nn.Parameter(torch.eye(3, dtype=D) * 2)).sin(), x @ w
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


def test_how_often_f_is_run():
    f, after, x = Counter(torch.sin), Counter(lambda x: x + 1), leaf(3)
    y = funcckpt.checkpoint(f, x).sum()
    for calls in (2, 3):
        torch.autograd.grad(y, x, retain_graph=True)
        assert f.calls == calls

    def calls(**options):
        after.reset()
        funcckpt.checkpoint(lambda x: after(x.sin()), x, **options).sum().backward()
        return after.calls

    assert calls() == 1
    with set_checkpoint_early_stop(False):
        assert calls() == calls(early_stop=True) == 2
    with set_checkpoint_early_stop(True):
        assert calls(early_stop=False) == 1


def test_partial_backwards_leave_nothing():
    """Of torch's, each leaves what it has recomputed and not read. So does a look at a saved tensor."""
    x = leaf(64)
    f = lambda x: (x.sin().sin().sin().exp(), x.cos().cos().cos())
    with Storages().known(x) as storages:
        a, b = funcckpt.checkpoint(lambda x: funcckpt.checkpoint(f, x.exp()), x)
        before = storages.live
        assert before == 2 * x.nbytes  # what is returned
        for _ in range(2):
            torch.autograd.grad(a.sum(), x, retain_graph=True)
            gc.collect()
            assert storages.live == before
            assert torch.equal(a.grad_fn._saved_result, a)
            gc.collect()
            assert storages.live == before
        assert_same(torch.autograd.grad(b.sum(), x), torch.autograd.grad(f(x.exp())[1].sum(), x))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_recomputed_tensors_are_freed_as_they_are_used(retain_graph):
    x, made, alive = leaf(64), [], []

    def f(x):
        for _ in range(4):
            x = x.clone()
            x.register_hook(lambda g: alive.append(sum(ref() is not None for ref in made)))
            made.append(weakref.ref(x.untyped_storage()))
            x = x.sin()
        return x

    y = funcckpt.checkpoint(f, x)
    made.clear()
    y.sum().backward(retain_graph=retain_graph)
    assert len(made) == 4 and alive == [3, 2, 1, 0]


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_left_behind(backward):
    h = leaf(3) * 2
    ref = weakref.ref(h)
    y = funcckpt.checkpoint(lambda a: (a * 2).sin(), h)
    del h
    assert ref() is not None
    if backward:
        y.sum().backward()
    else:
        del y
    assert ref() is None


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_of_other_devices(preserve, monkeypatch):
    """With a stand-in for a second device, whose stream an operator draws from."""
    stream, x = torch.Generator().manual_seed(5), leaf(4)
    module = SimpleNamespace(is_initialized=lambda: True, default_generators=(stream,))
    monkeypatch.setattr(world, "autocast_devices", lambda: ("cpu", "cpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with torch.library._scoped_library("funcckpt_tests", "DEF") as library:
        library.define("draw(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
        library.impl("draw", lambda x: torch.rand(x.shape, dtype=D, generator=stream), "CPU")
        f = lambda x: (x * torch.ops.funcckpt_tests.draw(x.detach())).sin()
        y = funcckpt.checkpoint(f, x, preserve_rng_state=preserve)
        end, scale = stream.get_state(), torch.rand(4, dtype=D, generator=torch.Generator().manual_seed(5))
        (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, (scale * (x * scale).cos()).detach()) == preserve
    assert torch.equal(stream.get_state(), end) == preserve


class Twice(Square):
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] + g * ctx.saved_tensors[0]


def write_to_view(x):
    (y := x * 1)[1:].exp_()
    return y * x


@pytest.mark.parametrize(("f", "calls"), [(Twice.apply, 3), (write_to_view, 2)])
def test_saved_tensors_that_are_read_twice(f, calls):
    """Torch raises here. In double backward, autograd itself reads twice what the write has saved."""
    f, x = Counter(f), leaf(3)
    (g,) = torch.autograd.grad(funcckpt.checkpoint(f, x).sum(), x, create_graph=True)
    assert f.calls == calls
    (want,) = torch.autograd.grad(f.f(x).sum(), x, create_graph=True)
    assert_same([g, *torch.autograd.grad(g.sum(), x)], [want, *torch.autograd.grad(want.sum(), x)])


@pytest.mark.parametrize(
    ("bodies", "says"),
    [
        ((lambda x: x.sin().sin(), torch.sin), "A different number of tensors was saved"),
        ((torch.sin, lambda x: x.sin().sin()), r"trying to save more|different number"),
        ((torch.sin, lambda x: x[:2].sin()), "have different metadata"),
    ],
    ids=["fewer", "more", "shape"],
)
def test_other_saved_tensors_are_an_error(bodies, says):
    with pytest.raises(CheckpointError, match=says):
        funcckpt.checkpoint(Changing(*bodies), leaf(3), early_stop=False).sum().backward()


def test_the_check_of_shapes_can_be_switched_off():
    f = Changing(lambda x: x.sin().sum(), lambda x: x[:2].sin().sum())
    with pytest.raises(RuntimeError) as error:
        funcckpt.checkpoint(f, leaf(3), determinism_check="none").backward()
    assert not isinstance(error.value, CheckpointError)
    with pytest.raises(ValueError, match="determinism_check must be one of"):
        funcckpt.checkpoint(torch.sin, leaf(3), determinism_check="sometimes")


def test_debug_lists_the_operators_of_both_runs():
    def listed():
        f = Changing(lambda x: x.sin().exp(), lambda x: x.cos()[:2].exp())
        with pytest.raises(CheckpointError) as error:
            funcckpt.checkpoint(f, leaf(3), debug=True).sum().backward()
        return str(error.value)

    forward, recompute = listed().split("Operations executed during recomputation")
    assert "aten.sin.default" in forward.split("Operations executed during the original forward")[1]
    assert "aten.cos.default" in recompute and "aten.sin.default" not in recompute
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(False):
        assert "aten.sin.default" not in listed()


def test_graph_exec_group():
    f, x = Counter(lambda x: (x.sin().exp(), x.cos().exp())), leaf(3)
    a, b = funcckpt.checkpoint(f, x)
    with GraphExecGroup():
        (ga,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
        (gb,) = torch.autograd.grad(b.sum(), x, retain_graph=True)
        assert f.calls == 2
        assert_same(torch.autograd.grad(b.sum(), x)[0], gb)  # again, where torch raises
        assert f.calls == 3
    assert_same(ga + gb, (x.cos() * x.sin().exp() - x.sin() * x.cos().exp()).detach())


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


def test_an_argument_that_is_given_twice():
    """It is one object in all runs, also inside of another checkpoint: attention asks for that."""
    attend = nn.MultiheadAttention(4, 2, dtype=D, batch_first=True)
    twice = lambda *of: funcckpt.checkpoint(lambda *of: funcckpt.checkpoint(attend, *of)[0], *of)
    q = leaf(2, 3, 4)
    (g,) = torch.autograd.grad(twice(q, q, q).sum(), q)
    assert_same(g, torch.autograd.grad(attend(q, q, q)[0].sum(), q)[0])


def test_a_saved_tensor_that_f_overwrites():
    def f(x):
        y = x.sin()
        z = y * y
        y.mul_(2)
        return z.exp()

    with pytest.raises(MutationError, match=r"x\.clone\(\)"):
        funcckpt.checkpoint(f, leaf(3)).sum().backward()


def test_inference_mode_around_the_backward_or_an_argument():
    def run(wrap):
        x, w = torch.tensor([[0.3, 0.5], [2.0, 3.0]], dtype=torch.float64, requires_grad=True).unbind()
        with torch.inference_mode():
            t = torch.arange(2.0, dtype=torch.float64)
        y = wrap(lambda x, t: (x * w).sin().exp() * (x + t))(x, t).sum()
        with torch.inference_mode():
            return torch.autograd.grad(y, (x, w))

    found, plain = (run(wrap) for wrap in (lambda f: functools.partial(funcckpt.checkpoint, f), lambda f: f))
    assert_same([x.clone() for x in found], [x.clone() for x in plain])


def test_an_argument_that_retains_its_gradient_under_other_hooks():
    """The recomputation gets another tensor with the same node, and must not take away its hook."""
    kept, x = [], leaf(3)

    def f(x):
        x.retain_grad()
        kept.append(x)
        return x.sin()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        y = funcckpt.checkpoint(f, x * 2)
    y.sum().backward()
    assert_same(kept[0].grad, (x.detach() * 2).cos())
