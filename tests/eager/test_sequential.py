"""checkpoint_sequential, and the choice of its segments."""

import itertools
import random

import numpy as np
import pytest
import torch
from support import Counter, Storages, assert_same
from torch import nn
from torch.func import functional_call, grad, vmap

from funcckpt import checkpoint_sequential, plan_segments
from funcckpt.eager.sequential import Cost, _behind_writers, best_segments, measure_layers
from funcckpt.errors import InputError, OptionError, TransformError
from funcckpt.nn import Sequential

from .implementations import D


def model(n=7, width=4):
    layer = lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(*[layer() for _ in range(n)]).double()


class Chain(nn.Module):
    def __init__(self, net, segments):
        super().__init__()
        self.net, self.segments = net, segments

    def forward(self, x):
        return self.net(x) if self.segments == "plain" else checkpoint_sequential(self.net, self.segments, x)


backward = lambda chain, x: torch.autograd.grad(chain(x).sum(), [x, *chain.parameters()])


def per_sample(chain, x):
    parameters = {name: p.detach() for name, p in chain.named_parameters()}
    loss = lambda p, x: functional_call(chain, p, (x,)).sum()
    return vmap(grad(loss), (None, 0), randomness="different")(parameters, x.detach())


def one_module_twice():
    """`torch.utils.checkpoint.checkpoint_sequential` runs it once."""
    layer = nn.Linear(4, 4, dtype=D)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Tanh(), layer, nn.Dropout(0.5))


@pytest.mark.parametrize("run", [backward, per_sample])
@pytest.mark.parametrize("segments", [1, 2, 7, None, [2, 4, 1], np.int64(2), torch.tensor(2)], ids=str)
@pytest.mark.parametrize("make", [model, one_module_twice])
def test_gradients(make, segments, run):
    torch.manual_seed(0)
    net, x = make(), torch.randn(3, 4, dtype=D, requires_grad=True)

    def seeded(chain):
        torch.manual_seed(2)
        return run(chain, x), torch.rand(2)

    assert_same(seeded(Chain(net, segments)), seeded(Chain(net, "plain")))


def test_uneven_division_and_the_last_segment_is_not_recomputed():
    def calls(count, segments):
        layers = [Counter(torch.sin) for _ in range(count)]
        x = torch.ones(3, requires_grad=True)
        checkpoint_sequential(layers, segments, x, early_stop=False).sum().backward()
        return [layer.calls for layer in layers]

    assert calls(7, 3) == [2, 2, 2, 2, 2, 1, 1]
    assert calls(7, 2) == [2, 2, 2, 2, 1, 1, 1]
    assert calls(9, None) == [2] * 6 + [1] * 3
    assert calls(4, [1, 3]) == [2, 1, 1, 1]
    assert calls(3, 1) == [1, 1, 1]
    x = torch.ones(3)
    assert checkpoint_sequential([], 1, x) is x and plan_segments([], x) == [0]


def test_errors():
    x = torch.ones(1, 4, dtype=D)
    for segments in (0, 8, [3, 3], [8, -1], [0, 7], "7"):
        with pytest.raises(OptionError, match="7 functions"):
            checkpoint_sequential(model(), segments, x)
    with pytest.raises(OptionError, match="plan_segments: 1 functions"):
        plan_segments([torch.sin], x, 7)
    for functions, what in (
        (torch.sin, "a builtin_function_or_method"),
        ([torch.sin, nn.Linear], "a list that holds <class .*Linear"),
        (nn.ModuleDict({"a": nn.Linear(4, 4)}), "a ModuleDict that holds 'a'"),
        (x, "a Tensor that holds tensor"),
    ):
        for call in (lambda f: checkpoint_sequential(f, 2, x), lambda f: plan_segments(f, x)):
            with pytest.raises(
                InputError, match=f"takes an nn.Sequential or a list of functions, not {what}"
            ):
                call(functions)
    for segments in (2.0, np.array([3, 4])):
        with pytest.raises(OptionError, match="cannot be divided by segments="):
            checkpoint_sequential(model(), segments, x)
    with pytest.raises(OptionError, match=r"plan_segments finds the lengths.*not \[3, 4\]"):
        plan_segments(model(), x, [3, 4])
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint_sequential(model(), 2, x, determinism_check="all")


def peak(net, x, segments):
    """Bytes alive at most in a forward and backward, gradients included."""
    net.zero_grad(set_to_none=True)
    x = x.detach().clone()
    with Storages().known(x, list(net.parameters())) as storages:
        checkpoint_sequential(net, segments, x).sum().backward()
    return storages.peak


class Wide(nn.Module):
    """Keeps much inside, and gives little."""

    def __init__(self, into, inside, out):
        super().__init__()
        self.up, self.down = nn.Linear(into, inside), nn.Linear(inside, out)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x).exp()).sin())


def divisions(n):
    for k in range(n):
        for inner in itertools.combinations(range(1, n), k):
            yield [b - a for a, b in itertools.pairwise([0, *inner, n])]


@pytest.mark.parametrize("handed_on", [[], [nn.Flatten()]])
@pytest.mark.parametrize("segments", [None, 2, 3, 5])
def test_no_segment_starts_with_a_layer_that_writes_to_its_input(segments, handed_on):
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), *handed_on, nn.ReLU(inplace=True))]
    lengths, x = plan_segments(layers, torch.randn(64, 8), segments), torch.randn(4, 8)
    assert len(lengths) == (segments or len(lengths)) > 1
    assert all([isinstance(layers[start], nn.Linear) for start in itertools.accumulate(lengths[:-1])])
    checkpoint_sequential(layers, lengths, x).sum().backward()


@pytest.mark.parametrize("segments", [*range(1, 8), None])
def test_a_number_of_segments_of_layers_that_write_to_their_input(segments):
    """A segment that would start with one starts behind it; torch cuts elsewhere."""
    layers = [layer for _ in range(7) for layer in (nn.Linear(8, 8), nn.ReLU(inplace=True))]
    x = torch.randn(4, 8)
    run = lambda f: torch.autograd.grad(f(x).sum(), [p for layer in layers[::2] for p in layer.parameters()])
    assert_same(run(lambda x: checkpoint_sequential(layers, segments, x)), run(nn.Sequential(*layers)))


def test_only_activations_that_write_to_their_input_move_a_segment():
    """Not a block with such inside, and not the start of the last segment, which is not recomputed."""
    write, linear, block = nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True))
    block.inplace = True
    assert _behind_writers([linear, linear, write, write, linear, linear], [2, 2, 2]) == [4, 2]
    assert _behind_writers([linear, write, write, linear, linear], [1, 1, 3]) == [2, 3]
    assert _behind_writers([linear, linear, write, linear], [2, 2]) == [2, 2]
    assert _behind_writers([linear, block, linear], [1, 1, 1]) == [1, 1, 1]


def test_the_first_layer_writes_to_its_input():
    """Only a segment that is not recomputed may start with it."""
    layers = [nn.ReLU(inplace=True), *[Wide(8, 64, 8) for _ in range(8)]]
    stem, x = nn.Linear(8, 8), torch.randn(64, 8)
    assert len(plan_segments(layers[1:], stem(x))) > 1
    plan = plan_segments(layers, stem(x))
    assert plan == [9]
    checkpoint_sequential(layers, plan, stem(x)).sum().backward()


def test_no_other_cuts_are_better():
    """All divisions of a small uneven chain, run and metered."""
    net, x = nn.Sequential(*[Wide(8, n, 8) for n in (200, 8, 100, 8, 8, 50, 8)]), torch.randn(32, 8)
    peaks = {tuple(division): peak(net, x, division) for division in divisions(len(net))}
    assert peaks[tuple(plan_segments(net, x))] == min(peaks.values())


def test_the_search_is_exhaustive():
    """Against all divisions, by the model's own count."""

    def held(costs, lengths):
        worst = start = inputs = 0
        for length in lengths:
            inputs += costs[start - 1].output if start else 0
            for i in range(start, start + length):
                kept = sum(c.kept for c in costs[start : i + 1])
                later = sum(c.gradients for c in costs[i + 1 :])
                worst = max(worst, inputs + kept + costs[i].backward + later)
            start += length
        return worst

    draw = random.Random(0).randrange
    for _ in range(60):
        costs = [Cost(draw(9), draw(30), draw(9), draw(9)) for _ in range(1 + draw(7))]
        found = {tuple(division): held(costs, division) for division in divisions(len(costs))}
        for k in (None, *range(1, len(costs) + 1)):
            plan = tuple(best_segments(costs, k))
            assert k in (None, len(plan))
            assert found[plan] == min(n for d, n in found.items() if k in (None, len(d)))


class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return (x - self.mean).sin()


def test_planning_leaves_everything_as_it_was():
    own = torch.Generator()
    draws = lambda x: x * random.random() * torch.rand(4, generator=own)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Assigning(), nn.Dropout(0.5), nn.Linear(4, 4))
    before, buffers = list(net.buffers()), [b.clone() for b in net.buffers()]
    state, of_python, of_own = torch.get_rng_state(), random.getstate(), own.get_state()
    plan_segments([*net, draws], torch.randn(8, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == of_python
    assert torch.equal(own.get_state(), of_own)
    assert_same(list(net.buffers()), buffers)
    assert all(a is b for a, b in zip(before, net.buffers(), strict=True))
    assert all(p.grad is None for p in net.parameters())


def test_measured_costs():
    x = torch.ones(4, 8, requires_grad=True)
    tanh, linear, relu = measure_layers([torch.tanh, nn.Linear(8, 16), nn.ReLU(inplace=True)], x)
    n, m = 4 * 8 * 4, 4 * 16 * 4
    assert (tanh.output, tanh.kept, linear.output) == (n, n, m)
    assert linear.kept == m  # not saved by itself, but written over and saved by the next
    assert linear.gradients == (8 * 16 + 16) * 4
    assert (relu.output, relu.kept) == (m, 0)
    # What a layer hands on is kept by the one that made it.
    layers = [nn.Linear(8, 16), nn.Flatten(), torch.tanh, torch.square]
    linear, flatten, tanh, square = measure_layers(layers, torch.ones(4, 8))
    assert (linear.kept, flatten.output, flatten.kept, tanh.kept, square.kept) == (0, m, 0, m, 0)


@pytest.mark.parametrize("every", [1, 2, 3, 4, np.int64(5)])
@pytest.mark.parametrize("skip_last", [False, True])
def test_a_sequential_starts_no_group_with_an_activation_in_place(every, skip_last):
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU(inplace=True))]
    x = torch.randn(2, 4, requires_grad=True)
    model = Sequential(*layers, every=every, skip_last=skip_last)
    expected = torch.autograd.grad(nn.Sequential(*layers)(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x), expected)
    torch.testing.assert_close(grad(lambda x: model(x).sum())(x.detach()), expected[0])


@pytest.mark.parametrize("transform", [grad, vmap])
def test_no_plan_under_a_transform(transform):
    with pytest.raises(TransformError, match="Plan before it"):
        transform(lambda x: plan_segments([torch.sin, torch.cos], x))(torch.ones(3))
