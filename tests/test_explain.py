"""Exact costs with and without each checkpoint, and advice where one cannot help."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from funcckpt import InputError, checkpoint, explain, policies, remat
from funcckpt.inspect.explain import Calls, measure as measure_with
from funcckpt.inspect.residuals import Subject
from funcckpt.meter import measure
from funcckpt.nn import apply_remat

N, D, H, LAYERS = 32, 8, 64, 4
FIRST = 2 * N * D * H  # FLOPs of the first matmul of a block; the second takes as many


def block(p, x):
    return torch.tanh(torch.tanh(x @ p[0]) @ p[1])


def deep(wrap, skip_last=False):
    def loss(ps, x):
        for i, p in enumerate(ps):
            x = (block if skip_last and i == LAYERS - 1 else wrap(block))(p, x)
        return x.sum()

    return loss


PS = [(torch.randn(D, H), torch.randn(H, D)) for _ in range(LAYERS)]
X = torch.randn(N, D)
KEPT = 4 * N * (H + D)  # both results of a block's tanh
TWICE = 2 * FIRST  # a forward of a block


def test_blocks():
    """Of each block its input is kept; and its first half is run again, for the second is not needed."""
    found = explain(grad(deep(remat)), PS, X)
    assert found.without.kept_bytes == LAYERS * KEPT
    assert found.cost.kept_bytes == (LAYERS - 1) * 4 * N * D  # X is an argument
    (site,) = found.sites
    assert (site.name, site.calls, site.without) == ("remat(block)", LAYERS, found.without)
    assert found.recomputed_flops == site.recomputed_flops
    assert found.recomputed_flops in (LAYERS * FIRST, LAYERS * TWICE)
    assert found.cost.peak_bytes < found.without.peak_bytes
    assert [r.kind for r in found.residuals].count("output") == LAYERS - 1


@pytest.mark.parametrize(
    "f", [grad(deep(remat)), grad(deep(lambda f: f)), vmap(grad(deep(remat)), (None, 0))]
)
def test_to_look_changes_nothing(f):
    cost, m = explain(f, PS, X[:, None]).cost, measure(f, PS, X[:, None])
    assert (cost.peak_bytes, cost.flops) == (m.peak_bytes, m.flops)


def test_nothing_is_recomputed_without():
    plain, found = explain(grad(deep(lambda f: f)), PS, X), explain(grad(deep(remat)), PS, X)
    assert plain.cost == plain.without == found.without
    assert not plain.sites and "There is no checkpoint in it" in str(plain)


def test_batched():
    xs = torch.randn(3, N, D)
    found = explain(vmap(grad(deep(remat)), (None, 0)), PS, xs)
    assert found.without.kept_bytes == 3 * LAYERS * KEPT
    assert found.cost.kept_bytes == 3 * (LAYERS - 1) * 4 * N * D


@pytest.mark.parametrize("wrap", [remat, lambda f: lambda *args: checkpoint(f, *args)])
def test_with_its_backward(wrap):
    """A function that takes no derivative is measured with its backward, which leaves no gradients."""
    x = X.clone().requires_grad_()
    found = explain(deep(wrap), PS, x)
    assert x.grad is None
    assert found.without.kept_bytes == LAYERS * 4 * N * D + LAYERS * 4 * N * H
    assert found.sites[0].calls == LAYERS and found.recomputed_flops >= LAYERS * FIRST
    assert found.cost.peak_bytes < found.without.peak_bytes


def test_the_last_call_is_for_nothing():
    (site,) = explain(deep(remat), PS, X).sites
    assert "last of the 4 calls of remat(block)" in site.advice and "FLOPs" in site.advice
    better = explain(deep(remat, skip_last=True), PS, X)
    assert better.recomputed_flops < site.recomputed_flops
    assert better.cost.peak_bytes <= explain(deep(remat), PS, X).cost.peak_bytes


def test_the_whole_function():
    (advice,) = explain(remat(deep(lambda f: f)), PS, X).advice
    assert "remat(deep.<locals>.loss) is the whole function" in advice and "around its parts" in advice


def test_the_last_part():
    def loss(p, x):
        return remat(lambda x: block(p, x).sum())(torch.cos(x).sin())

    (advice,) = explain(loss, PS[0], X).advice
    assert "it is the last part" in advice and "Call it without a checkpoint: that saves" in advice


def test_inputs_larger_than_residuals():
    """The sum of a large product: addition keeps nothing, remat the large result before it."""

    def loss(x):
        y = remat(lambda y: y.sum(0) + 1)(x + 1)
        return y.sin().sum()

    (advice,) = explain(loss, torch.randn(1000, 4)).advice
    assert "keeps no less than without" in advice and advice.endswith("Call it without a checkpoint.")


def test_each_checkpoint_alone():
    def other(p, x):
        return F.gelu(x @ p[0]) @ p[1]

    def loss(ps, x):
        for p in ps:
            x = remat(other)(p, remat(block)(p, x))
        return x.sum()

    found = explain(grad(loss), PS, X)
    assert [(s.name, s.calls) for s in found.sites] == [
        ("remat(block)", LAYERS),
        ("remat(test_each_checkpoint_alone.<locals>.other)", LAYERS),
    ]
    assert sum(s.recomputed_flops for s in found.sites) == found.recomputed_flops
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == [
        "as it is",
        "without remat(block), called 4 times",
        "without remat(test_each_checkpoint_alone.<locals>.other), called 4 times",
        "without any",
    ]


def test_nested():
    """Recomputed calls of an inner checkpoint are no calls of the forward."""

    def pair(ps, x):
        for p in ps:
            x = remat(block)(p, x)
        return x

    def loss(ps, x):
        return remat(pair)(ps[2:], remat(pair)(ps[:2], x)).sum()

    found = explain(grad(loss), PS, X)
    assert [s.calls for s in found.sites] == [2, LAYERS]
    assert found.without == explain(grad(deep(lambda f: f)), PS, X).cost


def test_modules():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D)) for _ in range(3)])
    before = explain(model, X)
    apply_remat(model, "?")
    found = explain(model, X)
    assert found.without == before.cost and found.sites[0].calls == 3
    assert found.cost.peak_bytes < before.cost.peak_bytes
    assert all(p.grad is None for p in model.parameters())


def test_other_policies():
    """What `plot_tradeoff` does: each call is made with another policy."""
    subject = Subject(grad(deep(remat)), (PS, X), {})
    cost, _ = measure_with(subject, Calls())
    more, _ = measure_with(subject, Calls(policy=policies.everything_saveable))
    without, _ = measure_with(subject, Calls(lambda key, i: True))
    assert more.flops == without.flops < cost.flops
    assert more.kept_bytes > cost.kept_bytes


def test_randomness_is_the_same_in_each_run():
    state = torch.get_rng_state()
    explain(lambda x: remat(F.dropout)(x).sin().sum(), X)
    assert torch.equal(state, torch.get_rng_state())


def test_printed():
    w, x = torch.ones(64, 64), torch.ones(100, 64)
    found = explain(remat(lambda w, x: torch.tanh(x @ w).exp().sum()), w, x)
    assert str(found).splitlines()[:3] == [
        "                                                                  kept        peak    FLOPs  recomputed",
        "as it is                                                           0 B    75.0 KiB    3.3 M     819.2 k",
        "without remat(test_printed.<locals>.<lambda>), called once    50.0 KiB    75.0 KiB    2.5 M           0",
    ]


def test_errors():
    with pytest.raises(InputError, match="a function and its arguments"):
        explain(X)
