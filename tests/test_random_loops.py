"""Random loops under random transforms against the plain loop.

The carry of a random loop is mixed, swapped, passed through, doubled, detached, made anew; its ys are of
all kinds; its schedule is any.
"""

import random

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import assert_same
from test_scan import SCHEDULES, TRANSFORMS, XS, D, V, W, X, plain_scan
from torch.func import grad, jacrev, vmap
from torch.utils import _pytree as pytree

from funcckpt import scan

F64 = torch.float64
LOOPS = 80

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
    options = draw.choice([*SCHEDULES, {"checkpoints": 2, "offload": "disk"}])
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
@pytest.mark.parametrize("seed", range(LOOPS))
def test_random_loop(seed):
    f = random_loop(seed)
    for name in random.Random(1000 + seed).sample(list(MORE), 3):
        run = MORE[name]
        got = run(lambda *args: f(scan, *args))
        assert_same(got, run(lambda *args: f(plain_scan, *args)), name)
