"""The recomputation sees the world of the forward: random streams, autocast, default device and dtype,
grad mode. And the world does not see the recomputation.
"""

import contextlib
import functools

import pytest
import torch
from compositions.stacks import stack
from oracles import F64, assert_same, compare, plain, tensor, total, world
from support import WRAPS, default_dtype
from torch.func import grad, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

from funcckpt import CheckpointError, remat
from funcckpt.world import streams_at


def in_stack(names, make, wrap, dtype=F64):
    """`make(wrap)`, a function of x and w, under the transforms with these names; and the stream after it."""
    torch.manual_seed(7)
    with default_dtype(dtype):
        inputs = tensor(3, dtype=dtype), tensor(3, 3, seed=1, dtype=dtype)
        return stack(*names.split())(make(wrap))(*inputs), torch.rand(3)


def attention(x):
    q = x.reshape(1, 1, 3, 1)
    return scaled_dot_product_attention(q, q.sin(), q, dropout_p=0.5).reshape(3)


def dropped(x):
    return dropout(torch.tanh(x), 0.5) * x


def noise(x):
    return torch.tanh(x * torch.randn_like(x))


def put_back_inside(x):
    with torch.random.fork_rng(devices=[]):
        return dropped(x)


RANDOM = {
    "noise": noise,
    "new_noise": lambda x: torch.tanh(x * torch.randn(3, dtype=F64)) * torch.randint(1, 5, (3,)),
    "bernoulli_in_place": lambda x: (x * torch.empty_like(x.detach()).bernoulli_(0.5)).sin(),
    "twice": lambda x: noise(dropped(x)) + dropped(x),
    "into_an_argument": lambda x: torch.rrelu(x.cos() - 1, training=True).sin(),
    "put_back": put_back_inside,
    "attention": attention,
}
EAGER = "backward", "vjp_twice", "grad_x grad_x", "jacfwd_same jacrev_x", "grads_batched"
BATCHED = (
    *("vmap_x grad_x", "vmap_different vjp_twice", "vmap_same vmap_different grad_x"),
    *("vmap_same_unbatched grad_x", "grad_x vmap_different_unbatched", "backward vmap_different"),
)
TRACED = "traced vmap_same_unbatched grad_aux", "traced jvp_both grad_x", "traced_symbolically grad_aux"


def chain(wrap, f):
    """Two remats with draws between and after them."""
    g, h = wrap(f), wrap(f)
    return lambda x, w: h(g(x) * torch.rand(())) * torch.rand(()) * w.sum()


# Attention takes another way to draw where it is traced or batched.
WAYS = [(name, way) for name in RANDOM for way in EAGER]
WAYS += [(name, way) for name in [*RANDOM][:5] for way in (*BATCHED, *TRACED)]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(("name", "transforms"), WAYS)
def test_random(name, transforms):
    compare(lambda wrap: in_stack(transforms, lambda wrap: chain(wrap, RANDOM[name]), wrap), remat)


def test_a_traced_gradient_is_differentiated():
    """Where autograd records nothing it takes other formulas, of which those of solve have a wrong derivative."""
    matrix = lambda x: torch.outer(x, x) + 2 * torch.eye(3, dtype=F64)

    def run(wrap):
        f = grad(lambda x: wrap(lambda x: torch.linalg.solve(matrix(x), x).sin())(x).sum())
        f = make_fx(f)(tensor(3)) if wrap is remat else f
        return grad(lambda x: f(x).pow(2).sum())(tensor(3))

    assert_same(run(remat), run(plain))


def test_a_pullback_that_is_traced_without_its_forward():
    _, pull = vjp(remat(noise), tensor(3))
    with pytest.raises(CheckpointError, match="trace the forward too"):
        make_fx(lambda ct: pull(ct))(tensor(3))


def with_generator(x, gen):
    mask = torch.empty(3, dtype=F64).bernoulli_(0.5, generator=gen)
    return torch.tanh(x * torch.randn(3, generator=gen, dtype=F64)) * mask + x.sin()


PLACES = {
    "argument": lambda wrap, gen: lambda x: wrap(with_generator)(x, gen),
    "static": lambda wrap, gen: lambda x: wrap(with_generator, static_argnames="gen")(x, gen=gen),
    "partial": lambda wrap, gen: wrap(functools.partial(with_generator, gen=gen)),
    "nested": lambda wrap, gen: wrap(lambda x: wrap(lambda x: with_generator(x, gen))(x) * x),
}


@pytest.mark.parametrize("transforms", [*EAGER, *BATCHED])
@pytest.mark.parametrize("place", PLACES)
def test_generator(place, transforms):
    def run(wrap):
        gen = torch.Generator().manual_seed(11)

        def make(wrap):
            f = PLACES[place](wrap, gen)
            # The generator moves on before the backward.
            return lambda x, w: (f(f(x)), torch.randn(2, generator=gen))[0] * w.sum()

        return in_stack(transforms, make, wrap), torch.randn(3, generator=gen)

    compare(run, remat)


def seeded_inside(x):
    torch.manual_seed(3)
    return dropped(x)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("f", [dropped, seeded_inside, put_back_inside])
def test_recomputation_does_not_move_the_stream(f, wrap):
    def run(wrap):
        torch.manual_seed(7)
        x = tensor(3, requires_grad=True)
        y = wrap(f)(x)
        first = torch.rand(2)
        y.sum().backward()
        return x.grad, first, torch.rand(2)

    assert_same(run(WRAPS[wrap]), run(plain))


def test_streams_stay_where_they_are_after_an_interrupt():
    """The collector closes what an interrupt has left, at any time later."""
    before = torch.get_rng_state()
    left = streams_at([(torch.default_generator, before)]).gen
    next(left)
    torch.rand(1)
    here = torch.get_rng_state()
    left.close()
    assert torch.equal(torch.get_rng_state(), here)


def test_preserve_rng_state_off():
    """Then the recomputation draws anew: nobody was promised the same masks."""
    torch.manual_seed(0)
    remat(noise, preserve_rng_state=False)(tensor(3, requires_grad=True)).sum().backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(3, dtype=F64), torch.randn(3, dtype=F64)
    assert torch.equal(after, torch.get_rng_state())


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype=dtype, **options)


@pytest.mark.parametrize("transforms", ["vmap_x grad_both", "jvp_both", "backward"])
def test_transforms_under_autocast(transforms):
    def f(x, w):
        h = x @ w
        with autocast(enabled=False):
            h = torch.tanh(h.float() @ w)
        return h @ w

    def run(wrap):
        with autocast():
            return in_stack(transforms, lambda wrap: wrap(f), wrap, torch.float32)

    compare(run, remat)


WORLDS = {
    "nothing": contextlib.nullcontext,
    "autocast": autocast,
    "autocast_float16": lambda: autocast(dtype=torch.float16),
    "autocast_no_cache": lambda: autocast(cache_enabled=False),
    "autocast_off": lambda: autocast(enabled=False),
    "default_dtype": lambda: default_dtype(F64),
    "default_device": lambda: torch.device("meta"),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "no_overrides": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.parametrize("there", WORLDS)
@pytest.mark.parametrize("here", WORLDS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_each_run_of_f_sees_the_world_of_the_call(wrap, here, there):
    """The forward is called in one world, the backward in another; the second is restored to what it was."""
    seen = []

    def f(x):
        seen.append(world())
        return x.sin() * torch.ones(3).to(x)

    device = "meta" if here == "default_device" else "cpu"
    with torch.device("cpu"):
        x = tensor(3, dtype=torch.float32).to(device).requires_grad_()
        ct = torch.ones(3, device=device)
    with WORLDS[here]():
        at_call = world()
        y = WRAPS[wrap](f)(x)
        assert world() == at_call
    with WORLDS[there]():
        at_backward = world()
        y.backward(ct)
        assert world() == at_backward
    assert seen == [at_call, at_call]


def partly_without_grad(x):
    assert torch.is_grad_enabled()
    with torch.no_grad():
        scale = x.exp()
    return (x * scale).sin()


ALWAYS = torch.no_grad()(lambda x: x.sin()), torch.enable_grad()(lambda x: x.sin() * x)
DIFFERENTIATING = "backward", "vmap_x grad_x", "hessian_x"


@pytest.mark.parametrize("outside", [contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("transforms", DIFFERENTIATING)
@pytest.mark.parametrize("f", [partly_without_grad, *ALWAYS])
def test_grad_mode_changed_inside(f, transforms, outside):
    """`torch.func.grad` differentiates under no_grad, too."""

    def run(wrap):
        with outside() if transforms != "backward" else contextlib.nullcontext():
            return in_stack(transforms, lambda wrap: lambda x, w: wrap(f)(x) + w.sum() * x, wrap)

    compare(run, remat)


@pytest.mark.parametrize("transforms", DIFFERENTIATING)
@pytest.mark.parametrize("f", ALWAYS)
def test_called_under_no_grad(f, transforms):
    def make(wrap):
        return lambda x, w: ((y := torch.no_grad()(wrap(f))(x)) * x * w.sum(), torch.tensor(y.requires_grad))

    compare(lambda wrap: in_stack(transforms, make, wrap), remat)


@pytest.mark.parametrize("f", [lambda c, w: c + w.sin(), lambda c, w: c * w.sin()])
def test_inference_tensor_as_argument(f):
    """What plain torch lets pass (it need not save the tensor) passes, and no more."""

    def run(wrap):
        with torch.inference_mode():
            c = tensor(3, seed=1)
        w = tensor(3, requires_grad=True)
        wrap(f)(c, w).sum().backward()
        return w.grad

    compare(run, remat)


def _backward(f, x, mode):
    y = total(f(x.requires_grad_()))
    with mode():
        y.backward()
    return x.grad, x.grad.requires_grad


def _batched_pullback(f, x, mode):
    _, pull = vjp(f, x)
    with mode():
        return vmap(pull)(torch.eye(3, dtype=F64))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("way", [_backward, _batched_pullback])
@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_backward_where_nothing_is_recorded(way, mode, captured):
    """The recomputation has to be."""

    def run(wrap):
        h = lambda x: x.sin() * x
        f = (lambda x: wrap(lambda: h(x))()) if captured else wrap(h)
        return way(f, tensor(3), mode)

    compare(run, remat)
