"""Exact costs with and without each checkpoint, and advice where one cannot help."""

import pytest
import torch
from oracles import plain
from torch.func import grad, vmap

from funcckpt import InputError, checkpoint, explain, policies, remat
from funcckpt.inspect.explain import Calls, measure as measure_with
from funcckpt.inspect.residuals import Subject
from funcckpt.meter import measure

N, D, H, LAYERS = 32, 8, 64, 4
FIRST = 2 * N * D * H  # FLOPs of the first matmul of a block; the second takes as many


def block(p, x):
    return torch.tanh(torch.tanh(x @ p[0]) @ p[1])


def deep(wrap, last=None):
    def loss(ps, x):
        for p in ps[:-1]:
            x = wrap(block)(p, x)
        return (last or wrap)(block)(ps[-1], x).sum()

    return loss


def nested(ps, x):
    def pair(ps, x):
        for p in ps:
            x = remat(block)(p, x)
        return x

    return remat(pair)(ps[2:], remat(pair)(ps[:2], x)).sum()


by_hooks = lambda f: lambda *args: checkpoint(f, *args)


PS = [(torch.randn(D, H), torch.randn(H, D)) for _ in range(LAYERS)]
X = torch.randn(N, D)
KEPT = 4 * N * (H + D)  # both results of a block's tanh
INPUT = 4 * N * D
ONE = {"remat(block)": LAYERS}
# The calls of each checkpointed function, and the number of inputs that are kept.
FOUND = {
    "plain": (grad(deep(plain)), {}, None),
    "grad": (grad(deep(remat)), ONE, 3),
    "vmap(grad)": (vmap(grad(deep(remat)), (None, 0)), ONE, 3 * 3),
    # A function that takes no derivative is measured with its backward.
    "remat": (deep(remat), ONE, 3),
    "hooks": (deep(by_hooks), {"checkpoint(block)": LAYERS}, 3),
    # Recomputed calls of an inner checkpoint are no calls of the forward.
    "nested": (grad(nested), {"remat(nested.<locals>.pair)": 2, **ONE}, 1),
}


@pytest.mark.parametrize("name", FOUND)
def test_costs(name):
    f, calls, kept = FOUND[name]
    samples = 3 if name == "vmap(grad)" else 1
    x = torch.randn(3, N, D) if samples > 1 else X.clone()
    x.requires_grad_(name in ("remat", "hooks"))
    state = torch.get_rng_state()
    found = explain(f, PS, x)
    assert torch.equal(state, torch.get_rng_state()) and x.grad is None
    assert {site.name: site.calls for site in found.sites} == calls
    assert kept in (None, found.cost.kept_bytes / INPUT)
    assert found.without.kept_bytes == samples * LAYERS * KEPT
    assert found.cost.kept_bytes == sum(r.bytes for r in found.residuals if r.kind == "output")
    if not calls:
        assert found.cost == found.without and "It calls no remat" in str(found)
        return
    assert found.cost.peak_bytes < found.without.peak_bytes and found.recomputed_flops >= LAYERS * FIRST
    if name == "nested":
        assert [line.split("  ")[0] for line in str(found).splitlines()[1::3]] == ["as it is", "without any"]
    else:
        assert sum(site.recomputed_flops for site in found.sites) == found.recomputed_flops
    if name in ("grad", "vmap(grad)"):  # to look changes nothing
        m = measure(f, PS, x)
        assert (found.cost.peak_bytes, found.cost.flops) == (m.peak_bytes, m.flops)


def last_part(ps, x):
    return remat(lambda x: block(ps[0], x).sum())(torch.cos(x).sin())


def large_inputs(ps, x):
    """The sum of a large product: addition keeps nothing, remat the large result before it."""
    return remat(lambda y: y.sum(0) + 1)(x + 1).sin().sum()


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (deep(remat), ["last of the 4 calls of remat(block)", "FLOPs"]),
        (remat(deep(plain)), ["remat(deep.<locals>.loss) is the whole function", "around its parts"]),
        (last_part, ["it is the last part", "Call it without a checkpoint: that saves"]),
        (large_inputs, ["keeps no less than without", "Call it without a checkpoint."]),
    ],
)
def test_advice(f, words):
    advice = explain(f, PS, torch.randn(1000, D) if f is large_inputs else X).advice
    assert len(advice) == 1
    for word in words:
        assert word in advice[0]


def test_a_function_that_makes_its_leaves():
    def f(x):
        w = torch.ones(X.shape[-1], 8, requires_grad=True)
        return remat(lambda x, w: torch.tanh(x @ w).exp())(x, w).sum()

    assert explain(f, X.detach()).recomputed_flops > 0


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda x: checkpoint(f, x)])
def test_a_budget_in_place_of_the_policies(wrap):
    """Another way by hooks than that of other policies."""
    w = torch.ones(X.shape[-1], 8, requires_grad=True)
    subject = Subject(lambda x: wrap(lambda x: torch.tanh(x @ w).exp())(x).sum(), (X.detach(),), {})
    cost, _ = measure_with(subject, Calls())
    kept, _ = measure_with(subject, Calls(policy=policies.budget(fraction=1.0)))
    assert kept.kept_bytes > cost.kept_bytes


def test_other_ways():
    """The advice is good; and what `plot_tradeoff` does: each call is made with another policy."""
    found, better = explain(deep(remat), PS, X), explain(deep(remat, last=plain), PS, X)
    assert better.recomputed_flops < found.recomputed_flops
    assert better.cost.peak_bytes <= found.cost.peak_bytes
    subject = Subject(grad(deep(remat)), (PS, X), {})
    cost, _ = measure_with(subject, Calls())
    more, _ = measure_with(subject, Calls(policy=policies.everything_saveable))
    without, _ = measure_with(subject, Calls(lambda key, i: True))
    assert more.flops == without.flops < cost.flops
    assert more.kept_bytes > cost.kept_bytes


def test_printed():
    w, x = torch.ones(64, 64), torch.ones(100, 64)
    found = explain(remat(lambda w, x: torch.tanh(x @ w).exp().sum()), w, x)
    assert str(found).splitlines()[:3] == [
        "                                                                  kept        peak    FLOPs  recomputed",
        "as it is                                                           0 B    75.0 KiB    3.3 M     819.2 k",
        "without remat(test_printed.<locals>.<lambda>), called once    50.0 KiB    75.0 KiB    2.5 M           0",
    ]
    with pytest.raises(InputError, match="a function and its arguments"):
        explain(X)
