"""Random loops under random transforms against the plain loop.

The carry of a random loop is mixed, swapped, passed through, doubled, detached, made anew; its ys are of
all kinds; its schedule is any. Loops follow each other and nest, in `remat` and around it.
FUNCCKPT_RANDOM_LOOPS says how many (default 120), and FUNCCKPT_RANDOM_START the first seed.
"""

import os
import random

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import assert_same, seeds
from test_scan import SCHEDULES, TRANSFORMS, XS, D, V, W, X, plain_scan
from torch.func import grad, jacrev, vmap
from torch.utils import _pytree as pytree

from funcckpt import InputError, fori_loop, inner_grad, policies, remat, scan, while_loop

F64 = torch.float64
COUNT = int(os.environ.get("FUNCCKPT_RANDOM_LOOPS", "120")) // 3
START = int(os.environ.get("FUNCCKPT_RANDOM_START", "0"))

# What becomes of a part of the carry: (it, the next one, what the one before it became, x, w, k) -> new.
CHANGES = {
    "mix": lambda c, other, before, x, w, k: torch.tanh(w @ c + x * other),
    "swap": lambda c, other, before, x, w, k: other,
    "same": lambda c, other, before, x, w, k: c,
    "double": lambda c, other, before, x, w, k: c.sin() if before is None else before,
    "detach in part": lambda c, other, before, x, w, k: (c * x).detach() + c / 2,
    "use an integer": lambda c, other, before, x, w, k: c * torch.cos(k.to(F64)) + x,
    "view": lambda c, other, before, x, w, k: c.view(1, -1)[0],
    "constant": lambda c, other, before, x, w, k: torch.ones_like(c),
    "x": lambda c, other, before, x, w, k: x * 1.0,
}
MORE_OPTIONS = [
    {"checkpoints": 2, "offload": "disk"},
    {"checkpoints": 2, "policy": policies.dots_saveable},
]
YS = {
    "carry": lambda cs, new, x, w, k: cs[0],
    "new carry": lambda cs, new, x, w, k: new[0],
    "none": lambda cs, new, x, w, k: None,
    "x": lambda cs, new, x, w, k: x,
    "tree": lambda cs, new, x, w, k: {"p": cs[0] * w[0], "q": [k, new[-1]]},
    "constant": lambda cs, new, x, w, k: torch.ones(2),
    "captured": lambda cs, new, x, w, k: w,
}


def random_loop(seed):
    draw = random.Random(seed)
    steps = draw.randint(1, 9)
    changes = [CHANGES[draw.choice(list(CHANGES))] for _ in range(draw.randint(1, 3))]
    y_of = YS[draw.choice(list(YS))]
    options = draw.choice([*SCHEDULES, *MORE_OPTIONS])
    reverse, same_init, has_xs = draw.random() < 0.4, draw.random() < 0.2, draw.random() < 0.7

    def f(loop, w, x, xs):
        def step(carry, x):
            cs, k = carry
            x = torch.ones(D, dtype=F64) if x is None else x["a"]
            new = []
            for i, change in enumerate(changes):
                other, before = cs[(i + 1) % len(cs)], new[-1] if new else None
                new.append(change(cs[i], other, before, x, w, k))
            return (new, k + 1), y_of(cs, new, x, w, k)

        init = [x if same_init else x * (i + 1) for i in range(len(changes))], torch.tensor(0)
        xs = {"a": xs[:steps]} if has_xs else None
        (cs, _), ys = loop(step, init, xs, steps, reverse=reverse, **options)
        weights = lambda y: torch.arange(1, y.numel() + 1, dtype=F64).reshape(y.shape)
        leaves = [y.to(F64) for y in pytree.tree_leaves((cs, ys)) if y is not None]
        return sum(((y * weights(y)).cos() * (i + 1)).sum() for i, y in enumerate(leaves))

    return f


def eager(f):
    """Two backwards; a gradient that is None is zero here."""
    leaves = [t.clone().requires_grad_() for t in (W, X, XS)]
    out = f(*leaves)
    gradients = []
    for _ in range(2):
        if not (isinstance(out, torch.Tensor) and out.requires_grad):
            break
        found = torch.autograd.grad(out, leaves, create_graph=True, allow_unused=True)
        gradients.append([torch.zeros_like(t) if g is None else g.detach() for g, t in zip(found, leaves)])
        out = sum((g * g).sum() for g in found if g is not None)
    return gradients


def plain_forward_mode(f):
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(W, V), forward_ad.make_dual(X, X), XS)
        primal, tangent = forward_ad.unpack_dual(out)
        return primal, torch.zeros_like(primal) if tangent is None else tangent


MORE = {
    **TRANSFORMS,
    "eager": eager,
    "plain forward mode": plain_forward_mode,
    "jacrev of all": lambda f: jacrev(f, (0, 1, 2))(W, X, XS),
    "vmap of grad of vmap": lambda f: vmap(
        grad(lambda w, x: vmap(f, (None, 0, None))(w, x, XS).sum()), (None, 1)
    )(W, torch.stack([XS[:2], XS[2:4]], 1)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("seed", seeds(60, 2 * COUNT, START))
def test_random_loop(seed):
    f = random_loop(seed)
    for name in random.Random(1000 + seed).sample(list(MORE), 3):
        run = MORE[name]
        got = run(lambda *args: f(scan, *args))
        assert_same(got, run(lambda *args: f(plain_scan, *args)), name)


class Plain:
    """The loops without checkpoints."""

    grad = staticmethod(grad)

    @staticmethod
    def remat(f):
        return f

    @staticmethod
    def scan(f, carry, length, **options):
        return plain_scan(f, carry, length=length)[0]

    @staticmethod
    def fori(lower, upper, f, carry, **options):
        for i in range(lower, upper):
            carry = f(i, carry)
        return carry

    @staticmethod
    def until(going_on, f, carry, **options):
        while going_on(carry):
            carry = f(carry)
        return carry


class Ours(Plain):
    grad, remat = staticmethod(inner_grad), staticmethod(remat)
    fori, until = staticmethod(fori_loop), staticmethod(while_loop)

    @staticmethod
    def scan(f, carry, length, **options):
        return scan(f, carry, length=length, **options)[0]


# What becomes of x: (loops, step, x, n, options) -> new x. `times` counts the steps of a while_loop.
def times(loops, step, x, n, options):
    return loops.until(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (0, x), **options)[1]


LINKS = {
    "while": times,
    "scan": lambda loops, step, x, n, o: loops.scan(lambda c, _: (step(c), None), x, n, **o),
    "fori": lambda loops, step, x, n, o: loops.fori(2, 2 + n, lambda i, c: step(c) / i, x, **o),
    "scan in while": lambda loops, step, x, n, o: times(
        loops, lambda x: loops.scan(lambda c, _: (step(c), None), x, n, checkpoints=2), x, 3, o
    ),
    "while in scan": lambda loops, step, x, n, o: loops.scan(
        lambda c, _: (times(loops, step, c, n, {"checkpoints": 2}), None), x, 3, **o
    ),
    "remat in while": lambda loops, step, x, n, o: times(loops, loops.remat(step), x, n, o),
    "scan in scan": lambda loops, step, x, n, o: loops.scan(
        lambda c, _: (loops.scan(lambda c, _: (step(c), None), c, 2, checkpoints=1), None), x, n, **o
    ),
    "scan in remat": lambda loops, step, x, n, o: loops.remat(
        lambda x: loops.scan(lambda c, _: (step(c), None), x, n, **o)
    )(x),
    "while in remat": lambda loops, step, x, n, o: loops.remat(lambda x: times(loops, step, x, n, o))(x),
    "dropout": lambda loops, step, x, n, o: times(
        loops, lambda x: torch.nn.functional.dropout(step(x), 0.2), x, n, o
    ),
    "dropout in scan": lambda loops, step, x, n, o: loops.scan(
        lambda c, _: (torch.nn.functional.dropout(step(c), 0.2), None), x, n, **o
    ),
    "inner gradient": lambda loops, step, x, n, o: times(
        loops, lambda x: x - 0.1 * loops.grad(lambda h: (step(h) ** 2).sum())(x), x, n, o
    ),
    "numbers, None and a list": lambda loops, step, x, n, o: loops.until(
        lambda c: c["i"] < n,
        lambda c: {
            "i": c["i"] + 1,
            "none": None,
            "h": [step(c["h"][0]) * c["k"][0], c["h"][0]],
            "k": c["k"] + 1,
        },
        {"i": 0, "none": None, "h": [x, x], "k": torch.arange(2)},
        **o,
    )["h"][0],
}
LINK_OPTIONS = [
    {},
    {"checkpoints": 1},
    {"checkpoints": 2},
    {"checkpoints": 5},
    {"checkpoint": "every"},
    {"checkpoint": "sqrt"},
    {"bytes": 10**5},
    {"checkpoints": 2, "offload": "host"},
    {"checkpoints": 2, "offload": "disk"},
    {"checkpoints": 2, "policy": policies.dots_saveable},
    {"checkpoint": "sqrt", "policy": policies.everything_saveable},
    {"policy": [torch.ops.aten.tanh.default, torch.ops.aten.bernoulli.p]},
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("seed", seeds(30, COUNT, START))
def test_random_chain_of_loops(seed):
    draw = random.Random(seed)
    chain = [(draw.choice(list(LINKS)), draw.choice(LINK_OPTIONS)) for _ in range(draw.randint(1, 3))]
    n = draw.randint(1, 9)

    def f(loops, w, x, xs):
        for link, options in chain:
            step = lambda h: torch.tanh(w @ h) + h.sin() * xs[0]
            x = LINKS[link](loops, step, x, n, options)
        return (x * x).sum()

    transforms = {**MORE}
    if any("dropout" in link for link, _ in chain):  # which other vmaps let nobody draw
        transforms = {name: MORE[name] for name in ("grad", "grad of grad", "jvp", "hvp", "vjp", "eager")}
        transforms["jacrev"] = lambda f: jacrev(f, (0, 1, 2))(W, X, XS)
        transforms["vmap of nothing"] = lambda f: vmap(lambda _: f(W, X, XS), randomness="different")(XS)
    for randomness in ("same", "different"):
        transforms[f"vmap of grad, {randomness}"] = lambda f, randomness=randomness: vmap(
            grad(f, (0, 1)), (None, 0, None), randomness=randomness
        )(W, torch.stack([X, 2 * X]), XS)
    for name in draw.sample(list(transforms), 2):
        run, found = transforms[name], []
        for loops in (Ours, Plain):
            torch.manual_seed(seed)
            found.append((run(lambda *args, loops=loops: f(loops, *args)), torch.rand(1)))
        assert_same(*found, f"{name}: {chain}")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("options", [{"checkpoint": 3}, {"checkpoints": 2}], ids=str)
def test_an_error_names_the_step(reverse, options):
    """Counted along xs, in whatever part of the loop it stands."""
    step = lambda c, x: (c[:2] if x == 3 else c * x, None)
    with pytest.raises(InputError, match=r"step 3 returned carry as float64\[2\]"):
        scan(step, X.clone().requires_grad_(), torch.arange(8), reverse=reverse, **options)
