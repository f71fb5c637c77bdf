"""Random loops under random transforms against the plain loop.

The carry of a random loop is mixed, swapped, passed through, doubled, detached, made anew; its ys are of
all kinds; its schedule is any. Loops follow each other and nest, in `remat` and around it.
FUNCCKPT_RANDOM_LOOPS says how many (default 120), and FUNCCKPT_RANDOM_START the first seed.
"""

import functools
import os
import random
import types
from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import assert_same, seeds
from test_scan import SCHEDULES, TRANSFORMS, TWO_X, XS, D, V, W, X, plain_scan, plain_while
from torch.func import grad, jacrev, vmap
from torch.nn.functional import dropout
from torch.utils import _pytree as pytree

from funcckpt import fori_loop, inner_grad, policies, remat, scan, while_loop

F64 = torch.float64
COUNT = int(os.environ.get("FUNCCKPT_RANDOM_LOOPS", "120")) // 3
START = int(os.environ.get("FUNCCKPT_RANDOM_START", "0"))

TWO = {"checkpoints": 2}
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


def flipped(tree, k):
    """Keys of a dict may change places."""
    return dict(reversed(tree.items())) if k % 2 else tree


YS = {
    "carry": lambda cs, new, x, w, k: cs[0],
    "new carry": lambda cs, new, x, w, k: new[0],
    "none": lambda cs, new, x, w, k: None,
    "x": lambda cs, new, x, w, k: x,
    "tree": lambda cs, new, x, w, k: flipped({"p": cs[0] * w[0], "q": [k, new[-1], 0.5], "none": None}, k),
    "constant": lambda cs, new, x, w, k: torch.ones(2),
    "captured": lambda cs, new, x, w, k: w,
}


def random_loop(seed):
    draw = random.Random(seed)
    steps = draw.randint(1, 9)
    changes = [CHANGES[draw.choice(list(CHANGES))] for _ in range(draw.randint(1, 3))]
    y_of = YS[draw.choice(list(YS))]
    options = draw.choice([*SCHEDULES, TWO | {"offload": "disk"}, TWO | {"policy": policies.dots_saveable}])
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
        xs = {"a": xs[:steps], "none": None} if has_xs else None
        (cs, _), ys = loop(step, init, xs, steps, reverse=reverse, **options)
        weights = lambda y: torch.arange(1, y.numel() + 1, dtype=F64).reshape(y.shape)
        leaves = [y.to(F64) for y in pytree.tree_leaves((cs, ys)) if y is not None]
        return sum(((y * weights(y)).cos() * (i + 1)).sum() for i, y in enumerate(leaves))

    return f


def eager(f):
    """Two backwards; a gradient that is None is zero here."""
    leaves = [t.clone().requires_grad_() for t in (W, X, XS)]
    out, gradients = f(*leaves), []
    while len(gradients) < 2 and isinstance(out, torch.Tensor) and out.requires_grad:
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


FORI = lambda lower, upper, f, carry, **_: functools.reduce(lambda c, i: f(i, c), range(lower, upper), carry)
PLAIN = types.SimpleNamespace(grad=grad, remat=lambda f: f, scan=plain_scan, fori=FORI, until=plain_while)
OURS = types.SimpleNamespace(grad=inner_grad, remat=remat, scan=scan, fori=fori_loop, until=while_loop)


def times(loops, step, x, n, o):
    """A while_loop that counts its steps."""
    return loops.until(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (0, x), **o)[1]


scanned = lambda loops, step, x, n, o: loops.scan(lambda c, _: (step(c), None), x, length=n, **o)[0]


def tree(loops, step, x, n, o):
    """Numbers, None and a list; keys of a dict may change places."""

    def body(c):
        h = [step(c["h"][0]) * c["k"][0], c["h"][0]]
        return {"h": h, "i": c["i"] + 1, "none": None, "k": c["k"] + 1}

    init = {"i": 0, "none": None, "h": [x, x], "k": torch.arange(2)}
    return loops.until(lambda c: c["i"] < n, body, init, **o)["h"][0]


# (loops, step, x, n, options) -> new x
LINKS = {
    "while": times,
    "scan": scanned,
    "fori": lambda loops, step, x, n, o: loops.fori(2, 2 + n, lambda i, c: step(c) / i, x, **o),
    "scan in while": lambda ls, step, x, n, o: times(ls, lambda x: scanned(ls, step, x, n, TWO), x, 3, o),
    "while in scan": lambda ls, step, x, n, o: scanned(ls, lambda x: times(ls, step, x, n, TWO), x, 3, o),
    "remat in while": lambda loops, step, x, n, o: times(loops, loops.remat(step), x, n, o),
    "scan in remat": lambda loops, step, x, n, o: loops.remat(lambda x: scanned(loops, step, x, n, o))(x),
    "dropout": lambda loops, step, x, n, o: times(loops, lambda x: dropout(step(x)), x, n, o),
    "inner gradient": lambda loops, step, x, n, o: times(
        loops, lambda x: x - 0.1 * loops.grad(lambda h: (step(h) ** 2).sum())(x), x, n, o
    ),
    "tree": tree,
}
LINK_OPTIONS = [
    {},
    *[{"checkpoints": k} for k in (1, 2, 5)],
    *[{"checkpoint": rule} for rule in ("every", "sqrt")],
    {"bytes": 10**5},
    *[{"checkpoints": 2, "offload": place} for place in ("host", "disk")],
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
            x = LINKS[link](loops, lambda h: torch.tanh(w @ h) + h.sin() * xs[0], x, n, options)
        return (x * x).sum()

    transforms = {**MORE}
    if "dropout" in [link for link, _ in chain]:  # which other vmaps let nobody draw
        transforms = {name: MORE[name] for name in "grad|grad of grad|jvp|hvp|vjp|eager".split("|")}
        transforms["vmap of nothing"] = lambda f: vmap(lambda _: f(W, X, XS), randomness="different")(XS)
    for how in ("same", "different"):
        over = partial(vmap, in_dims=(None, 0, None), randomness=how)
        transforms[f"vmap of grad, {how}"] = lambda f, over=over: over(grad(f, (0, 1)))(W, TWO_X, XS)
    for name in draw.sample(list(transforms), 2):
        run, found = transforms[name], []
        for loops in (OURS, PLAIN):
            torch.manual_seed(seed)
            found.append((run(lambda *args, loops=loops: f(loops, *args)), torch.rand(1)))
        assert_same(*found, f"{name}: {chain}")
