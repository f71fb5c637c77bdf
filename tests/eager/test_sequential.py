"""checkpoint_sequential, and the choice of its segments."""

import itertools

import numpy as np
import pytest
import torch
from support import Counter, Storages, assert_same
from torch import nn

from funcckpt import checkpoint_sequential, plan_segments
from funcckpt.eager.sequential import Cost, best_segments, measure_layers
from funcckpt.errors import OptionError

from .implementations import D


def model(n=7, width=4):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n)]).double()


def gradients(run, net, x):
    x = x.detach().clone().requires_grad_()
    y = run(net, x)
    leaves = y if isinstance(y, tuple) else (y,)
    return y, torch.autograd.grad(sum(t.sum() for t in leaves), [x, *net.parameters()])


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 7, None, [2, 4, 1]])
@pytest.mark.parametrize("as_list", [False, True])
def test_gradients(segments, as_list):
    net, x = model(), torch.randn(3, 4, dtype=D)
    given = list if as_list else lambda net: net
    assert_same(
        gradients(lambda net, x: checkpoint_sequential(given(net), segments, x), net, x),
        gradients(lambda net, x: net(x), net, x),
    )


def calls(count, segments):
    layers = [Counter(torch.sin) for _ in range(count)]
    x = torch.ones(3, requires_grad=True)
    checkpoint_sequential(layers, segments, x, early_stop=False).sum().backward()
    return [layer.calls for layer in layers]


def test_uneven_division_and_the_last_segment_is_not_recomputed():
    assert calls(7, 3) == [2, 2, 2, 2, 2, 1, 1]
    assert calls(7, 2) == [2, 2, 2, 2, 1, 1, 1]
    assert calls(9, None) == [2] * 6 + [1] * 3
    assert calls(4, [1, 3]) == [2, 1, 1, 1]
    assert calls(3, 1) == [1, 1, 1]


@pytest.mark.parametrize("segments", [0, 8, [3, 3], [8, -1], [0, 7]])
def test_impossible_divisions(segments):
    with pytest.raises(OptionError, match="7 functions"):
        checkpoint_sequential(model(), segments, torch.ones(1, 4, dtype=D))


def test_several_tensors_between_segments():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair):
            a, more = pair
            return torch.tanh(self.linear(a) * more["b"]), {"b": more["b"].sin(), "n": more["n"]}

    net = nn.Sequential(*[Both() for _ in range(5)]).double()
    x = torch.randn(3, 4, dtype=D)

    def run(call):
        return gradients(lambda net, x: call(net, (x, {"b": x.exp(), "n": 3}))[0], net, x)

    assert_same(run(lambda net, x: checkpoint_sequential(net, 3, x)), run(lambda net, x: net(x)))


def test_options_of_checkpoint():
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint_sequential(model(), 2, torch.ones(1, 4, dtype=D), determinism_check="all")
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()

    def run(call):
        torch.manual_seed(2)
        return gradients(call, net, torch.ones(3, 4, dtype=D))

    checkpointed = lambda net, x: checkpoint_sequential(
        net, 2, x, use_reentrant=False, preserve_rng_state=True
    )
    assert_same(run(checkpointed), run(lambda net, x: net(x)))


def test_under_per_sample_gradients():
    net = model()
    parameters = {k: p.detach() for k, p in net.named_parameters()}

    def loss(call):
        def f(parameters, x):
            class Chain(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.net = net

                def forward(self, x):
                    return call(self.net, x)

            named = {f"net.{k}": p for k, p in parameters.items()}
            return torch.func.functional_call(Chain(), named, x).sum()

        return torch.func.vmap(torch.func.grad(f), (None, 0))(parameters, torch.ones(3, 4, dtype=D))

    assert_same(loss(lambda net, x: checkpoint_sequential(net, 3, x)), loss(lambda net, x: net(x)))


# -- where to cut -----------------------------------------------------------------------------------


def peak(net, x, segments):
    """Bytes alive at most in a forward and backward, gradients included."""
    net.zero_grad(set_to_none=True)
    x = x.detach().clone()
    with Storages().known(x, list(net.parameters())) as storages:
        checkpoint_sequential(net, segments, x).sum().backward()
    return storages.peak


class Wide(nn.Module):
    """Keeps much inside, and gives little."""

    def __init__(self, inside):
        super().__init__()
        self.up, self.down = nn.Linear(8, inside), nn.Linear(inside, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x).exp()).sin())


class Step(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.linear = nn.Linear(into, out)

    def forward(self, x):
        return torch.tanh(self.linear(x).sin().exp())


def uneven():
    """Stretches of different lengths in which every result is large, and small ones between."""
    widths = [8, 200, 200, 8, 8, 8, 300, 300, 300, 8, 8, 150, 8, 8, 8, 8, 250, 8]
    return nn.Sequential(*[Step(a, b) for a, b in itertools.pairwise(widths)])


def test_planned_segments_have_a_lower_peak_than_all_equal_counts():
    net, x = uneven(), torch.randn(512, 8)
    plan = plan_segments(net, x)
    assert peak(net, x, plan) < min(peak(net, x, k) for k in range(1, len(net) + 1))
    assert peak(net, x, plan) < 0.65 * peak(net, x, None)  # √n segments
    fixed = plan_segments(net, x, 4)
    assert len(fixed) == 4 and peak(net, x, fixed) < peak(net, x, 4)


def test_no_other_cuts_are_better():
    """All divisions of a small uneven chain, run and metered."""
    net = nn.Sequential(*[Wide(n) for n in (200, 8, 100, 8, 8, 50, 8)])
    x = torch.randn(32, 8)
    n = len(net)
    best = min(
        peak(net, x, [b - a for a, b in itertools.pairwise([0, *inner, n])])
        for k in range(n)
        for inner in itertools.combinations(range(1, n), k)
    )
    assert peak(net, x, plan_segments(net, x)) == best


def test_the_search_is_exhaustive():
    """Against all divisions, by the model's own count."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda high: int(torch.randint(high, (), generator=generator))

    def held(costs, lengths):
        worst, start, inputs = 0, 0, 0
        for length in lengths:
            inputs += costs[start - 1].output if start else 0
            kept = 0
            for i in range(start, start + length):
                kept += costs[i].kept
                later = sum(c.gradients for c in costs[i + 1 :])
                worst = max(worst, inputs + kept + costs[i].backward + later)
            start += length
        return worst

    for _ in range(60):
        n = 1 + draw(7)
        costs = [Cost(draw(9), draw(30), draw(9), draw(9)) for _ in range(n)]
        divisions = [
            [b - a for a, b in itertools.pairwise([0, *inner, n])]
            for k in range(n)
            for inner in itertools.combinations(range(1, n), k)
        ]
        low = min(held(costs, d) for d in divisions)
        plan = best_segments(costs)
        assert held(costs, plan) == low
        for k in range(1, n + 1):
            of_k = [d for d in divisions if len(d) == k]
            plan = best_segments(costs, k)
            assert len(plan) == k and held(costs, plan) == min(held(costs, d) for d in of_k)


def test_planning_leaves_everything_as_it_was():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    buffers = [b.clone() for b in net.buffers()]
    state = torch.get_rng_state()
    plan_segments(net, torch.randn(8, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(list(net.buffers()), buffers)
    assert all(p.grad is None for p in net.parameters())


def test_measured_costs():
    tanh, linear, relu = measure_layers(
        [torch.tanh, nn.Linear(8, 16), nn.ReLU(inplace=True)], torch.ones(4, 8, requires_grad=True)
    )
    x, y = 4 * 8 * 4, 4 * 16 * 4
    assert (tanh.output, tanh.kept, linear.output) == (x, x, y)
    assert linear.kept == y  # not saved by itself, but written over and saved by the next
    assert linear.gradients == (8 * 16 + 16) * 4
    assert relu.output == y and relu.kept == 0


def test_what_a_layer_hands_on_is_kept_by_the_one_that_made_it():
    linear, flatten, tanh, square = measure_layers(
        [nn.Linear(8, 16), nn.Flatten(), torch.tanh, torch.square], torch.ones(4, 8)
    )
    y = 4 * 16 * 4
    assert linear.kept == 0 and flatten.output == y and flatten.kept == 0
    assert tanh.kept == y and square.kept == 0


def test_empty_chain():
    x = torch.ones(3)
    assert checkpoint_sequential([], 1, x) is x and plan_segments([], x) == [0]


def test_a_module_that_the_chain_holds_twice():
    """`torch.utils.checkpoint.checkpoint_sequential` runs it once."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    net = nn.Sequential(layer, nn.Tanh(), layer)
    assert torch.equal(checkpoint_sequential(net, 2, x), net(x))
    assert sum(plan_segments(net, x)) == 3


# -- modules that are not as they seem -------------------------------------------------------------


class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return (x - self.mean).sin()


def test_planning_puts_back_buffers_that_are_assigned():
    net = nn.Sequential(Assigning(), nn.Linear(4, 4), Assigning())
    before = list(net.buffers())
    plan_segments(net, torch.randn(3, 4))
    assert all(a is b for a, b in zip(before, net.buffers(), strict=True))
    assert not any(b.any() for b in net.buffers())


@pytest.mark.parametrize("segments", [np.int64(2), torch.tensor(2)])
def test_numbers_of_other_kinds(segments):
    x = torch.randn(4)
    assert_same(checkpoint_sequential([torch.sin] * 3, segments, x), x.sin().sin().sin())
