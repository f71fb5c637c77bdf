"""The recomputation sees the world of the forward: random streams, autocast, default device and
dtype, grad mode.

And the world does not see the recomputation: the random stream ends where a run without remat
leaves it.
"""

import contextlib

import pytest
import torch
from oracles import F64, assert_same, compare, plain, tensor, total, weight, world
from support import WRAPS, default_dtype, registered
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout, scaled_dot_product_attention

from funcckpt import CheckpointError, remat

# ---------------------------------------------------------------- random streams


def bernoulli_in_place(x):
    mask = torch.empty_like(x.detach()).bernoulli_(0.5)
    return (x * mask).sin()


def attention(x):
    q = x.reshape(1, 1, 3, 1)
    return scaled_dot_product_attention(q, q.sin(), q, dropout_p=0.5).reshape(3)


def dropped(x):
    return dropout(torch.tanh(x), 0.5) * x


def noise(x):
    return torch.tanh(x * torch.randn_like(x))


def nothing_random(x):
    return torch.tanh(x) * x


RANDOM = {f.__name__: f for f in (dropped, noise, bernoulli_in_place, attention, nothing_random)} | {
    "new_noise": lambda x: torch.tanh(x * torch.randn(3, dtype=F64)) * torch.rand((), dtype=F64),
    "permuted": lambda x: (x * torch.randperm(3)).sin(),
    "integers": lambda x: (x * torch.randint(1, 5, (3,))).sin(),
    "twice": lambda x: noise(dropped(x)) + dropped(x),
}


def chain(wrap, f):
    """Two remats with draws between and after them."""
    g, h = wrap(f), wrap(f)
    return lambda x: h(g(x) * torch.rand((), dtype=F64)) * torch.rand((), dtype=F64)


def eager(f, x, **mode):
    return f(x)


def backward(f, x, **mode):
    x = x.clone().requires_grad_()
    y = f(x)
    torch.randn(5)  # the stream moves on before the backward
    total(y).backward()
    return y.detach(), x.grad


def double_backward(f, x, **mode):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(total(f(x)), x, create_graph=True)
    torch.randn(5)
    return torch.autograd.grad(total(g), x)


def later_pullback(f, x, **mode):
    y, pull = vjp(f, x)
    torch.randn(5)
    return y, pull(weight(y))


UNBATCHED = {
    "eager": eager,
    "backward": backward,
    "double_backward": double_backward,
    "later_pullback": later_pullback,
    "grad": lambda f, x: grad(lambda x: total(f(x)))(x),
    "grad_grad": lambda f, x: grad(lambda x: total(grad(lambda x: total(f(x)))(x)))(x),
    "jvp": lambda f, x: jvp(f, (x,), (weight(x),)),
    "jacrev": lambda f, x: jacrev(f)(x),  # vmaps the backward in error mode: must not raise
    "jacfwd_same": lambda f, x: jacfwd(f, randomness="same")(x),
    "hessian_same": lambda f, x: jacfwd(jacrev(lambda x: total(f(x))), randomness="same")(x),
    "jacrev_jacrev": lambda f, x: jacrev(jacrev(f))(x),
    "is_grads_batched": lambda f, x: torch.autograd.grad(
        f(leaf := x.clone().requires_grad_()), leaf, torch.eye(3, dtype=F64), is_grads_batched=True
    ),
    "jvp_of_grad": lambda f, x: jvp(grad(lambda x: total(f(x))), (x,), (weight(x),)),
}


def from_seed(thunk):
    """The result, and three numbers of the random stream after it."""
    torch.manual_seed(7)
    return thunk(), torch.rand(3, dtype=F64)


@pytest.mark.parametrize("transform", UNBATCHED)
@pytest.mark.parametrize("name", RANDOM)
def test_random(name, transform):
    run = lambda wrap: from_seed(lambda: UNBATCHED[transform](chain(wrap, RANDOM[name]), tensor(3)))
    compare(run, remat)


def with_outputs(f):
    """The gradient, and the outputs to whose random numbers it belongs."""

    def loss(x):
        y = f(x)
        return total(y), y

    return grad(loss, has_aux=True)


TRACED = {
    "grad": with_outputs,
    "vmap_grad_different": lambda f: vmap(with_outputs(f), randomness="different"),
    "vmap_grad_same": lambda f: vmap(with_outputs(f), randomness="same"),
    "vmap_of_nothing": lambda f: vmap(lambda x: with_outputs(f)(torch.ones(3, dtype=F64)), randomness="same"),
    "jacrev": jacrev,
    "grad_grad": lambda f: grad(lambda x: total(grad(lambda x: total(f(x)))(x))),
    "jvp_of_grad": lambda f: lambda x: jvp(grad(lambda x: total(f(x))), (x,), (weight(x),)),
}
# torch cannot trace dropout symbolically, and attention takes another way to draw in the second run.
SYMBOLIC = ("noise", "new_noise", "permuted", "integers")


@pytest.mark.parametrize("transform", TRACED)
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for mode in ("real", "fake") for name in RANDOM] + [(n, "symbolic") for n in SYMBOLIC],
)
def test_a_graph_of_make_fx_draws_once(name, transform, mode):
    def run(wrap):
        x = tensor(2, 3) if "vmap" in transform else tensor(3)
        f = TRACED[transform](chain(wrap, RANDOM[name]))
        if wrap is remat:
            f = make_fx(f, tracing_mode=mode)(x)
        return from_seed(lambda: f(x)), from_seed(lambda: f(1.5 * x))

    compare(run, remat)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_graph_of_an_operator_that_draws_into_its_argument(mode):
    f = lambda wrap: with_outputs(wrap(lambda x: torch.rrelu(x.sin(), training=True).sin()))
    graph = make_fx(f(remat), tracing_mode=mode)(tensor(3))
    compare(lambda wrap: from_seed(lambda: (graph if wrap is remat else f(wrap))(-tensor(3))), remat)


def test_a_pullback_that_is_traced_without_its_forward():
    _, pull = vjp(remat(noise), tensor(3))
    with pytest.raises(CheckpointError, match="trace the forward too"):
        make_fx(lambda ct: pull(ct))(tensor(3))


BATCHED = {
    "vmap": lambda f, x, **mode: vmap(f, **mode)(x),
    "vmap_dim1_chunked": lambda f, x, **mode: vmap(f, 1, chunk_size=1, **mode)(x.t().contiguous()),
    "vmap_grad": lambda f, x, **mode: vmap(grad(lambda x: total(f(x))), **mode)(x),
    "vmap_jvp": lambda f, x, **mode: vmap(lambda x: jvp(f, (x,), (weight(x),)), **mode)(x),
    "vmap_unbatched": lambda f, x, **mode: vmap(lambda i: f(x[0]) * i, **mode)(tensor(2, seed=3)),
    "vmap_grad_unbatched": lambda f, x, **mode: vmap(lambda i: grad(lambda x: total(f(x)) * i)(x[0]), **mode)(
        tensor(2, seed=3)
    ),
    "grad_vmap": lambda f, x, **mode: grad(lambda x: total(vmap(f, **mode)(x)))(x),
    "grad_vmap_unbatched": lambda f, x, **mode: grad(
        lambda x: total(vmap(lambda i: f(x) * i, **mode)(tensor(2, seed=3)))
    )(x[0]),
    "backward_vmap": lambda f, x, **mode: backward(vmap(f, **mode), x),
    "vmap_vmap": lambda f, x, **mode: vmap(vmap(f, **mode), **mode)(torch.stack([x, x * 2])),
    "vmap_vmap_grad": lambda f, x, **mode: vmap(vmap(grad(lambda x: total(f(x))), **mode), **mode)(
        torch.stack([x, x * 2])
    ),
    "jacrev_vmap": lambda f, x, **mode: jacrev(vmap(f, **mode))(x),
    "vmap_jacrev": lambda f, x, **mode: vmap(jacrev(f), **mode)(x),
    "vmap_hessian": lambda f, x, **mode: vmap(jacfwd(jacrev(f), **mode), **mode)(x),
    "vmap_later_pullback": lambda f, x, **mode: vmap(lambda x: later_pullback(f, x), **mode)(x),
}


RANDOM_BATCHED = [
    (name, transform)
    for name in ("dropped", "noise", "new_noise", "bernoulli_in_place", "twice", "nothing_random")
    for transform in BATCHED
    if (name, transform)
    != ("bernoulli_in_place", "vmap_hessian")  # torch 2.13 itself dies of a segmentation fault
]


@pytest.mark.parametrize("mode", ["same", "different", "error"])
@pytest.mark.parametrize(("name", "transform"), RANDOM_BATCHED)
def test_random_under_vmap(name, transform, mode):
    def run(wrap):
        return from_seed(lambda: BATCHED[transform](chain(wrap, RANDOM[name]), tensor(2, 3), randomness=mode))

    compare(run, remat)


@pytest.mark.parametrize("transform", ["vmap", "vmap_grad", "vmap_unbatched", "vmap_grad_unbatched"])
def test_different_is_different_and_same_is_same(transform):
    """Independent of the plain run: the rows are what the mode says."""
    x = tensor(1, 3).expand(2, 3).contiguous()
    f = remat(RANDOM["new_noise"])
    one = f if transform in ("vmap", "vmap_unbatched") else lambda x: grad(lambda x: total(f(x)))(x)

    def run(mode):
        if "unbatched" in transform:
            return vmap(lambda i: one(x[0]) + 0 * i, randomness=mode)(tensor(2, seed=3))
        return vmap(one, randomness=mode)(x)

    same, different = run("same"), run("different")
    assert torch.equal(same[0], same[1])
    assert not torch.isclose(different[0], different[1]).any()


# ---------------------------------------------------------------- explicit generators


def with_generator(x, gen):
    mask = torch.empty(3, dtype=F64).bernoulli_(0.5, generator=gen)
    return torch.tanh(x * torch.randn(3, generator=gen, dtype=F64)) * mask + x.sin()


class Noisy:
    def __init__(self, gen):
        self.gen = gen

    def __call__(self, x):
        return with_generator(x, self.gen)


PLACES = {
    "argument": lambda wrap, gen: lambda x: wrap(with_generator)(x, gen),
    "static": lambda wrap, gen: lambda x: wrap(with_generator, static_argnames="gen")(x, gen=gen),
    "closed_over": lambda wrap, gen: wrap(lambda x: with_generator(x, gen)),
    "attribute": lambda wrap, gen: wrap(Noisy(gen)),
    "nested_remat": lambda wrap, gen: wrap(lambda x: wrap(lambda x: with_generator(x, gen))(x) * x),
}


@pytest.mark.parametrize("transform", UNBATCHED)
@pytest.mark.parametrize("place", PLACES)
def test_generator(place, transform):
    def run(wrap):
        gen = torch.Generator().manual_seed(11)
        f = PLACES[place](wrap, gen)

        def moved(x):
            y = f(f(x))
            torch.randn(2, generator=gen)
            return y

        return from_seed(lambda: UNBATCHED[transform](moved, tensor(3))), torch.randn(3, generator=gen)

    compare(run, remat)


@pytest.mark.parametrize("mode", ["same", "different"])
@pytest.mark.parametrize("transform", BATCHED)
@pytest.mark.parametrize("place", ["argument", "closed_over"])
def test_generator_under_vmap(place, transform, mode):
    def run(wrap):
        gen = torch.Generator().manual_seed(11)
        f = PLACES[place](wrap, gen)
        out = from_seed(lambda: BATCHED[transform](f, tensor(2, 3), randomness=mode))
        return out, torch.randn(3, generator=gen)

    compare(run, remat)


PROGRAMS = {}
program = registered(PROGRAMS)


@program
def generator_reseeded_between_forward_and_backward(wrap):
    gen = torch.Generator().manual_seed(11)
    x = tensor(3, requires_grad=True)
    y = wrap(with_generator)(x, gen)
    gen.manual_seed(99)
    y.sum().backward()
    return x.grad, torch.randn(3, generator=gen)


def test_seeded_inside():
    """A function that seeds the global stream itself leaves it, after the backward too, as without
    remat.
    """

    def f(x):
        torch.manual_seed(3)
        return dropped(x)

    def run(wrap):
        x = tensor(3, requires_grad=True)
        y = wrap(f)(x)
        first = torch.rand(2)
        y.sum().backward()
        return x.grad, first, torch.rand(2)

    assert_same(run(remat), run(plain))


def test_recomputation_does_not_move_the_stream():
    x = tensor(3, requires_grad=True)
    y = remat(dropped)(x)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_preserve_rng_state_off():
    """Then the recomputation draws anew: the stream has moved twice, and nobody was promised the
    same masks.
    """
    torch.manual_seed(0)
    x = tensor(3, requires_grad=True)
    remat(noise, preserve_rng_state=False)(x).sum().backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randn(3, dtype=F64)
    torch.randn(3, dtype=F64)
    assert torch.equal(after, torch.get_rng_state())


# ---------------------------------------------------------------- autocast


def linear(x, w):
    return torch.tanh(x @ w) @ w


@contextlib.contextmanager
def autocast(enabled=True, dtype=torch.bfloat16, cache_enabled=True):
    with torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled):
        yield


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x, w: grad(lambda x, w: total(f(x, w).float()), argnums=(0, 1))(x, w),
        lambda f, x, w: vmap(grad(lambda x, w: total(f(x, w).float()), argnums=1), (0, None))(x, w),
        lambda f, x, w: jvp(f, (x, w), (x, w)),
        lambda f, x, w: vmap(f, (0, None))(x, w),
    ],
    ids=["grad", "vmap_grad", "jvp", "vmap"],
)
def test_transforms_under_autocast(transform):
    def run(wrap):
        x, w = tensor(2, 3, dtype=torch.float32), tensor(3, 3, seed=1, dtype=torch.float32)
        with autocast():
            return transform(wrap(linear), x, w)

    compare(run, remat)


def test_autocast_inside_and_switched_off_inside():
    def f(x, w):
        with autocast():
            h = x @ w
            with autocast(enabled=False):
                h = h.float() @ w
            return h @ w

    def run(wrap):
        x = tensor(2, 3, dtype=torch.float32, requires_grad=True)
        w = tensor(3, 3, seed=1, dtype=torch.float32, requires_grad=True)
        wrap(f)(x, w).float().sum().backward()
        return x.grad, w.grad

    assert_same(run(remat), run(plain))


# ---------------------------------------------------------------- what f can see, in each of its
# runs


WORLDS = {
    "nothing": contextlib.nullcontext,
    "autocast": autocast,
    "autocast_float16": lambda: autocast(dtype=torch.float16),
    "autocast_no_cache": lambda: autocast(cache_enabled=False),
    "autocast_off": lambda: autocast(enabled=False),
    "default_dtype": lambda: default_dtype(F64),
    "default_device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("there", WORLDS)
@pytest.mark.parametrize("here", WORLDS)
def test_each_run_of_f_sees_the_world_of_the_call(here, there):
    """The forward is called in one world, the backward in another; the second is restored to what
    it was.
    """
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
        y = remat(f)(x)
        assert world() == at_call
    with WORLDS[there]():
        at_backward = world()
        y.backward(ct)
        assert world() == at_backward
    assert len(seen) == 2
    assert seen[0] == at_call and seen[1] == at_call


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "vmap_grad", "grad_grad", "later"])
def test_each_run_of_f_sees_grad_mode_on_under_transforms(transform):
    seen = []

    def f(x):
        seen.append(torch.is_grad_enabled())
        return x.sin().sum()

    g = remat(f)
    x = tensor(2, 3)
    {
        "grad": lambda: grad(g)(x),
        "vmap": lambda: vmap(g)(x),
        "jvp": lambda: jvp(g, (x,), (x,)),
        "vmap_grad": lambda: vmap(grad(g))(x),
        "grad_grad": lambda: grad(lambda x: grad(g)(x).sum())(x),
        "later": lambda: vjp(g, x)[1](torch.ones((), dtype=F64)),
    }[transform]()
    assert seen and all(seen)


# ---------------------------------------------------------------- grad mode


def partly_without_grad(x):
    with torch.no_grad():
        scale = x.exp()
    return (x * scale).sin()


def set_grad_enabled_inside(x):
    previous = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    scale = x.exp()
    torch.set_grad_enabled(previous)
    return (x * scale).sin()


@torch.no_grad()
def without_grad(x):
    return x.sin()


@torch.enable_grad()
def with_grad(x):
    return x.sin() * x


def inference_inside(x):
    with torch.inference_mode():
        n = int((x > 0).sum()) if not torch._C._functorch.is_functorch_wrapped_tensor(x) else 2
    return x.sin() * n


GRAD_MODES = {f.__name__: f for f in (partly_without_grad, set_grad_enabled_inside, without_grad, with_grad)}


@pytest.mark.parametrize("outside", [contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("f", [*GRAD_MODES, "inference_inside"])
def test_grad_mode_changed_inside(f, outside):
    """`torch.func.grad` differentiates under no_grad, too."""

    def run(wrap):
        g = wrap(globals()[f])
        leaf, d = tensor(3, requires_grad=True), tensor(3)
        loss = lambda x: g(x).sum() + (x * 2).sum()
        with outside(), torch.enable_grad():
            y = loss(leaf)
        y.backward()
        with outside():
            return (
                leaf.grad,
                grad(loss)(d),
                grad(lambda x: grad(loss)(x).sum())(d),
                vmap(grad(loss))(torch.stack([d, d * 2])),
                jvp(g, (d,), (d,)),
                jvp(grad(loss), (d,), (d,)),
                hessian(loss)(d),
            )

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("f", GRAD_MODES)
def test_called_under_no_grad(f):
    def run(wrap):
        x = tensor(3, requires_grad=True)
        with torch.no_grad():
            y = wrap(GRAD_MODES[f])(x)
        z = (y * x).sum()
        z.backward()
        d = x.detach()

        def loss(x):
            with torch.no_grad():
                y = wrap(GRAD_MODES[f])(x)
            return (y * x).sum()

        return (
            y.requires_grad,
            x.grad,
            grad(loss)(d),
            vmap(grad(loss))(torch.stack([d, d])),
            jvp(loss, (d,), (d,)),
        )

    assert_same(run(remat), run(plain))


@program
def backward_under_no_grad(wrap):
    x = tensor(3, requires_grad=True)
    y = wrap(partly_without_grad)(x).sum()
    with torch.no_grad():
        y.backward()
    return x.grad, x.grad.requires_grad


# ---------------------------------------------------------------- inference mode


@program
def called_in_inference_mode(wrap):
    x = tensor(3, requires_grad=True)
    with torch.inference_mode():
        y = wrap(lambda x: x.sin() * x)(x)
        z = wrap(lambda x: x.sin() * x)(tensor(3))
    return y, y.is_inference(), y.requires_grad, z, z.is_inference()


def test_inference_tensor_as_argument():
    """What plain torch lets pass (it need not save the tensor) passes, and no more."""

    def run(f):
        def inner(wrap):
            with torch.inference_mode():
                c = tensor(3, seed=1)
            w = tensor(3, requires_grad=True)
            wrap(f)(c, w).sum().backward()
            return w.grad

        return inner

    assert_same(run(lambda c, w: c + w.sin())(remat), run(lambda c, w: c + w.sin())(plain))
    compare(run(lambda c, w: c * w.sin()), remat, allowed=())


IN_INFERENCE_MODE = {
    "vmap": lambda f, x: vmap(f)(torch.stack([x, x])),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "grad": lambda f, x: grad(f)(x),
    "grad_after_another_operator": lambda f, x: grad(lambda x: f(x.sin()))(x),
    "grad_of_captured": lambda f, x: grad(lambda w: f(x * w))(x),
    "vmap_grad": lambda f, x: vmap(grad(f))(torch.stack([x, x])),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones((), dtype=F64)),
    "jvp_grad": lambda f, x: jvp(grad(f), (x,), (x,)),
}


@pytest.mark.parametrize("transform", IN_INFERENCE_MODE)
def test_transforms_in_inference_mode(transform):
    """torch 2.11 gives zeros for a derivative that is taken there (pytorch#177318): remat raises."""

    def run(wrap, mode):
        f = wrap(lambda x: (x.sin() * x).sum())
        with torch.inference_mode(mode):
            return IN_INFERENCE_MODE[transform](f, tensor(3))

    want = run(plain, False)
    try:
        assert_same(run(plain, True), want)
    except AssertionError:
        with pytest.raises(CheckpointError, match="nothing in inference mode"):
            run(remat, True)
    else:
        assert_same(run(remat, True), want)


def _later(f, x):
    y, pull = vjp(f, x)
    with torch.inference_mode():
        return pull(weight(y))


def _later_batched(f, x):
    _, pull = vjp(f, x)
    with torch.inference_mode():
        return vmap(pull)(torch.eye(3, dtype=F64))


def _backward(f, x, **options):
    x = x.requires_grad_()
    y = total(f(x)) + x.sum()
    with torch.inference_mode():
        y.backward(**options)
    return x.grad, x.grad.requires_grad


def _grads_batched(f, x):
    y = f(x.requires_grad_())
    with torch.inference_mode():
        return torch.autograd.grad(y, x, torch.eye(3, dtype=F64), is_grads_batched=True)


def _second_backward(f, x):
    (g,) = torch.autograd.grad(total(f(x.requires_grad_())), x, create_graph=True)
    penalty = total(g)
    with torch.inference_mode():
        return torch.autograd.grad(penalty, x)


def _backward_at_a_level(f, x):
    def first(x):
        y = total(f(x))
        with torch.inference_mode():
            (g,) = torch.autograd.grad(y, x)
        return x.sum(), g

    return grad(first, has_aux=True)(x)


BACKWARD_IN_INFERENCE_MODE = {
    "backward": _backward,
    "create_graph": lambda f, x: _backward(f, x, create_graph=True),
    "is_grads_batched": _grads_batched,
    "second_backward": _second_backward,
    "at_a_level": _backward_at_a_level,
    "pullback": _later,
    "vmap_of_pullback": _later_batched,
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", BACKWARD_IN_INFERENCE_MODE)
@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_backward_in_inference_mode(name, captured):
    """Nothing is recorded there, and the recomputation has to be."""

    def run(wrap):
        h = lambda x: x.sin() * x
        f = (lambda x: wrap(lambda: h(x))()) if captured else wrap(h)
        return BACKWARD_IN_INFERENCE_MODE[name](f, tensor(3))

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_without_a_checkpoint(name, wrap):
    assert_same(PROGRAMS[name](WRAPS[wrap]), PROGRAMS[name](plain))
