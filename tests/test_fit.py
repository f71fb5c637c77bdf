"""`fit`: against all plans of small models, bytes by the count of the tests, results against those without."""

import copy
import itertools
import re

import pytest
import torch
from support import Storages, assert_same, outcome
from torch import nn
from torch.func import functional_call, grad, vmap

from funcckpt import InputError, OptionError, policies
from funcckpt.meter import measure
from funcckpt.nn import Remat, apply_remat, fit


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(torch.sin(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks of two kinds, a weight that is used twice, a buffer that is updated, and random numbers."""

    def __init__(self, narrow, wide):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.narrow = nn.ModuleList([Block(48) for _ in range(narrow)])
        self.wide = nn.Sequential(*[Block(128) for _ in range(wide)])
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(()))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        self.count += 1
        x = self.dropout(self.embedding(x))
        for block in self.narrow:
            x = block(x)
        return self.head(self.wide(x))


def a_model(narrow=1, wide=3):
    torch.manual_seed(0)
    return Model(narrow, wide).double()


X = torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(0))
loss_of = lambda model, x: nn.functional.cross_entropy(model(x).flatten(0, -2), x.flatten())


def backward(model, x):
    loss_of(model, x).backward()
    return [p.grad for p in model.parameters()]


def adam(model, x):
    optimizer = torch.optim.Adam(model.parameters())
    backward(model, x)
    optimizer.step()
    return list(model.parameters())


def per_sample(model, x):
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        out = functional_call(model, {**parameters, "count": torch.zeros(())}, (x[None],))
        return nn.functional.cross_entropy(out[0], x)

    return vmap(grad(loss), (None, 0), randomness="different")(parameters, x)


def chunked(model, x, *, chunk_size):
    parts = [per_sample(model, part) for part in x.split(chunk_size)]
    return {name: sum(part[name].square().sum(0) for part in parts) for name in parts[0]}


def least_of(step, model, **options):
    with pytest.raises(OptionError) as error:
        fit(model, step, X, bytes=1, **options)
    return int(re.search(r"peak that was found is ([\d,]+) bytes", str(error.value))[1].replace(",", ""))


def peak_of(step, model):
    with Storages().known(model.state_dict(), X) as storages:
        result = step(model, X)
    del result
    return storages.peak


@pytest.mark.parametrize("step", [backward, adam, per_sample])
def test_the_peak_is_within_the_bytes_and_the_result_the_same(step):
    model = a_model()
    most, least = peak_of(step, copy.deepcopy(model)), least_of(step, model)
    for part in (0, 0.4):
        bytes = int(least + part * (most - least))
        plan = fit(model, step, X, bytes=bytes)
        assert plan.peak_bytes_before == most
        assert peak_of(step, plan.apply(copy.deepcopy(model))) == plan.peak_bytes <= bytes
        with_plan, without = plan.apply(copy.deepcopy(model)), copy.deepcopy(model)
        found, expected = outcome(lambda m=with_plan: step(m, X)), outcome(lambda m=without: step(m, X))
        assert found.error is None
        assert_same(found.value, expected.value)
        assert torch.equal(found.rng, expected.rng)
        assert_same(dict(with_plan.named_buffers()), dict(without.named_buffers()))


def of_all_plans(step, model, names, choices):
    """Peak and FLOPs of each, on real tensors."""
    found = []
    for plan in itertools.product(["keep", *choices], repeat=len(names)):
        for _ in range(2):  # the first recomputation runs what later ones skip
            other = copy.deepcopy(model)
            for name, choice in zip(names, plan):
                if choice != "keep":
                    Remat(other.get_submodule(name), policy=choice)
            run = measure(step, other, X)
        found.append((run.peak_bytes, run.flops))
    return found


@pytest.mark.parametrize(
    ("step", "counts", "choices"),
    [(backward, (2, 2), (None, policies.dots_saveable)), (per_sample, (1, 3), (None,))],
)
def test_the_plan_is_the_best_of_all(step, counts, choices):
    model = a_model(*counts)
    names = [f"{kind}.{i}" for kind, count in zip(("narrow", "wide"), counts) for i in range(count)]
    all_plans = of_all_plans(step, model, names, choices)
    least, most = min(all_plans)[0], all_plans[0][0]
    for part in (0, 0.3, 0.6):
        bytes = int(least + part * (most - least))
        plan = fit(model, step, X, bytes=bytes, policies=choices[1:], select=Block)
        assert plan.flops == min(flops for peak, flops in all_plans if peak <= bytes)
    assert least_of(step, model, policies=choices[1:], select=Block) == least


def test_the_model_and_the_batch_stay_as_they_are():
    model = apply_remat(a_model(), "wide.0", preserve_rng_state=False)
    state, buffers, parameters = copy.deepcopy(model.state_dict()), [*model.buffers()], [*model.parameters()]
    x, rng, own = X.clone(), torch.get_rng_state(), torch.Generator()
    of_own = own.get_state()

    def step(model, batch):
        torch.rand(1, generator=own, device="cpu")
        batch["x"] += 1
        model.wide[0].note = "mine"
        adam(model, batch["x"] - 1)

    for device in ("meta", "cpu"):
        plan = fit(model, step, {"x": x}, bytes=700_000, measure_on=device)
    assert any(block.choice != "keep" for block in plan.blocks)
    assert (
        torch.equal(x, X) and torch.equal(rng, torch.get_rng_state()) and torch.equal(own.get_state(), of_own)
    )
    assert_same(dict(model.state_dict()), dict(state))
    for now, before in ((model.buffers(), buffers), (model.parameters(), parameters)):
        assert all(a is b for a, b in zip(now, before, strict=True))
    assert all(p.grad is None for p in parameters) and not hasattr(model.wide[0], "note")
    assert [type(m).__name__ for m in model.wide] == ["RematBlock", "Block", "Block"]
    plan.apply(model)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, Remat)}
    assert wrapped == {block.name for block in plan.blocks if block.choice != "keep"}


def test_the_table(capsys):
    model = a_model()
    bytes = int(0.7 * peak_of(backward, copy.deepcopy(model)))
    plan = fit(model, backward, X, bytes=bytes, select=Block)
    title, *rows, peak, recomputed = str(plan).splitlines()
    assert title.split("  ")[0] == "blocks" and rows[0].startswith("narrow.0 ") and "wide.2" in rows[-1]
    assert sum(block.recomputed_flops for block in plan.blocks) == plan.recomputed_flops
    assert f"{plan.peak_bytes / 1024:.1f} KiB after" in peak and "%" in recomputed
    assert capsys.readouterr().err == ""  # it is no terminal
    fit(model, backward, X, bytes=2**30, progress=True)
    assert "fit: run 1 of the step" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"Plan\.apply: Linear lacks a block of the plan"):
        plan.apply(nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"in Linear there is no ModuleList or Sequential .* Pass select="):
        fit(nn.Linear(2, 2), backward, X, bytes=100)


def test_chunk_size():
    """The largest with the fewest recomputed FLOPs."""
    model, x = a_model(0, 3), X[:4]
    peaks = {n: measure(chunked, copy.deepcopy(model), x, chunk_size=n).peak_bytes for n in (4, 2, 1)}
    for bytes, size in ((peaks[4], 4), (peaks[2], 2), (peaks[1], 1)):
        plan = fit(model, chunked, x, bytes=bytes, policies=())
        assert (plan.chunk_size, plan.recomputed_flops, plan.peak_bytes) == (size, 0, bytes)
        assert str(plan).endswith(f"chunk_size: {size}")
    tight = fit(model, chunked, x, bytes=peaks[1] - 1, policies=())
    assert tight.recomputed_flops == min(block.recomputed_flops for block in tight.blocks if block[3])


@pytest.mark.parametrize(
    ("select", "names"),
    [
        (None, ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]),
        ("stages.*", ["stages.0", "stages.1"]),
        (lambda name, module: name == "mlp", ["mlp"]),
    ],
)
def test_which_blocks(select, names):
    """Lists in a list, of which no two members are alike."""
    model = nn.Sequential()
    model.stages = nn.Sequential(*[nn.Sequential(Block(n), Block(n)) for n in (8, 24)])
    model.mlp = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    plan = fit(model, lambda m, x: m(x).sum().backward(), torch.ones(4, 16), bytes=2**30, select=select)
    assert [block.name for block in plan.blocks] == names


class Pairs(nn.Module):
    """Its list holds lists of two modules, which themselves have no forward."""

    def __init__(self):
        super().__init__()
        part = lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.layers = nn.ModuleList([nn.ModuleList([part(), part()]) for _ in range(3)])

    def forward(self, x):
        for first, second in self.layers:
            x = x + second(x + first(x))
        return x


def test_lists_in_a_list():
    step = lambda model, x: model(x).square().mean().backward()
    plan = fit(Pairs(), step, torch.ones(64, 16), bytes=140_000)
    assert [block.name for block in plan.blocks] == [f"layers.{i}.{j}" for i in range(3) for j in range(2)]
    assert {block.choice for block in plan.blocks} != {"keep"} and plan.peak_bytes <= 140_000


def reads_values(model, x):
    loss = loss_of(model, x)
    if loss.item() < 1e9:
        loss.backward()


def under_autocast(model, x):
    y = model(x)
    with torch.autocast("cpu"):
        loss = (y @ y.mT).sum()
    loss.backward()


def test_a_step_that_reads_values_is_measured_on_real_tensors():
    model = a_model(1, 2)
    bytes = int(0.8 * peak_of(backward, copy.deepcopy(model)))
    plan = fit(model, reads_values, X, bytes=bytes, measure_on="cpu")
    assert plan.peak_bytes <= bytes and plan == fit(model, backward, X, bytes=bytes)


@pytest.mark.parametrize(
    ("error", "text", "step", "options"),
    [
        (OptionError, "policies must be a list or tuple", backward, {"policies": policies.dots_saveable}),
        (OptionError, "fit: a policy is", backward, {"policies": ("dots_saveable",)}),
        (OptionError, "bytes='8GB' is not a positive number", backward, {"bytes": "8GB"}),
        (OptionError, "bytes=None is not a positive number", backward, {"bytes": None}),
        (InputError, "select='blocks.*' selects nothing. Pass a class", backward, {"select": "blocks.*"}),
        (InputError, "takes no Linear. Pass its class", backward, {"select": nn.Linear(2, 2)}),
        (InputError, "step calls no block", lambda model, x: x.sum(), {}),
        (OptionError, 'autocast casts nothing on "meta".*measure_on="cpu"', under_autocast, {}),
        (InputError, 'at aten._local_scalar_dense.default: (.|\n)*measure_on="cpu"', reads_values, {}),
        (InputError, 'to numpy(.|\n)*measure_on="cpu"', lambda model, x: model(x).detach().numpy(), {}),
    ],
)
def test_errors(error, text, step, options):
    with pytest.raises(error, match=text):
        fit(a_model(1, 2), step, X, **{"bytes": 2**30, **options})
    with pytest.raises(InputError, match="a model, then a step: function is no"):
        fit(step, a_model(1, 2), X, bytes=2**30)


def test_blocks_inside_of_blocks_are_not_planned():
    """Nor is the whole model, if it is not alone."""
    plan = fit(a_model(1, 3), backward, X, bytes=700_000, select=(Model, Block, nn.Linear))
    assert [block.name for block in plan.blocks] == ["narrow.0", "wide.0", "wide.1", "wide.2", "head"]


def test_a_block_inside_of_one_block_and_beside_it():
    """A module that is shared has one name, which may be that of the place inside."""
    inner = Block(8)

    class Outer(Block):
        def forward(self, x):
            return super().forward(self.inner(x))

    outer, model = Outer(64), nn.Module()
    outer.inner = inner
    model.first, model.second = inner, outer
    step = lambda model, x: model.second(model.first(x)).sum().backward()
    plan = fit(model, step, torch.randn(64, 16), bytes=2**20, select=Block)
    assert [block.name for block in plan.blocks] == ["second"]
