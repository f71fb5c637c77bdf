"""Per-sample helpers, against per-sample gradients of a Python loop over plain autograd, closed forms,
and Opacus.
"""

import copy
import re

import numpy as np
import pytest
import torch
from support import Storages, tensor_bytes
from torch import nn
from torch.func import functional_call

import funcckpt
from funcckpt.meter import measure
from funcckpt.nn import Remat, apply_remat
from funcckpt.per_sample import clipped_sum, gradient_norms, influence, noise_scale

F64 = torch.float64
close = torch.testing.assert_close


def problem(n=7):
    """A model, its per-sample loss, and data."""
    torch.manual_seed(0)
    model = nn.Sequential(Remat(nn.Linear(4, 5)), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).to(F64)
    parameters = dict(model.named_parameters())
    x, y = torch.randn(n, 4, dtype=F64), torch.randint(0, 3, (n,))

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    return model, parameters, loss, x, y


def by_hand(parameters, loss, *batch):
    """Per-sample gradients: ``[n, all parameters]``."""
    rows = []
    for sample in zip(*batch):
        g = torch.autograd.grad(loss(parameters, *sample), list(parameters.values()))
        rows.append(torch.cat([t.flatten() for t in g]))
    return torch.stack(rows)


flat = lambda tree: torch.cat([t.flatten() for t in tree.values()])


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
def test_norms_and_clipped_sum(chunk_size):
    _, parameters, loss, x, y = problem()
    rows = by_hand(parameters, loss, x, y)
    norms = gradient_norms(loss, parameters, x, y, chunk_size=chunk_size)
    close(norms, rows.norm(dim=1))
    bound = float(norms.median())
    result = clipped_sum(loss, parameters, x, y, max_norm=bound, eps=0.0, chunk_size=chunk_size)
    close(flat(result.sum), (rows * (bound / rows.norm(dim=1)).clamp(max=1)[:, None]).sum(0))
    close(result.norms, norms)
    assert not norms.requires_grad and not any(t.requires_grad for t in result.sum.values())
    nested = lambda tree, batch: loss(tree["all"][0], *batch["xy"])
    total = clipped_sum(nested, {"all": [parameters]}, {"xy": [x, y]}, max_norm=bound, eps=0.0).sum
    close(total, {"all": [result.sum]})
    assert {k: v.shape for k, v in result.sum.items()} == {k: v.shape for k, v in parameters.items()}


@pytest.mark.parametrize("chunk_size", [None, 10, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_of_single_precision(dtype, chunk_size):
    """Under autocast, and of parameters of half precision. The gradients themselves have eight bits."""
    p, x = torch.zeros(2, dtype=dtype), torch.tensor([[0.6, 0.8]], dtype=dtype).repeat(2000, 1)
    with torch.autocast("cpu", torch.bfloat16):
        result = clipped_sum(lambda p, x: (p * x).sum(), p, x, max_norm=2.0, chunk_size=chunk_size).sum
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), x.double().sum(0), rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("chunk_size", [None, 1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_are_of_single_precision(dtype, chunk_size):
    """The gradients themselves are of half precision: those below are the samples."""
    loss, zeros = lambda p, x: (p * x).sum(), torch.zeros(64, dtype=dtype)
    x = (0.05 * torch.randn(256, 64, generator=torch.Generator().manual_seed(0)) + 1).to(dtype)
    exact = noise_scale(loss, zeros.double(), x.double())
    found = noise_scale(loss, zeros, x, chunk_size=chunk_size)
    torch.testing.assert_close([*map(float, found)], [*map(float, exact)], rtol=1e-3, atol=0.0)
    large = torch.full((3, 64), 3e4, dtype=dtype)
    torch.testing.assert_close(
        gradient_norms(loss, zeros, large, chunk_size=chunk_size).double(),
        large.double().norm(dim=1),
        rtol=1e-6,
        atol=0.0,
    )
    for max_norm in (8.0, 8e-4):  # the factor has no place in float16
        total = clipped_sum(loss, zeros, large, max_norm=max_norm, chunk_size=chunk_size).sum
        exact = torch.full((64,), 3 * max_norm / 8, dtype=F64)
        torch.testing.assert_close(total.double(), exact, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("options", [{"chunk_size": 4}, {"bytes": 200_000}], ids=str)
def test_autocast_keeps_nothing_of_a_chunk(options):
    p, xs = {"w": torch.randn(64, 64)}, torch.randn(100, 64)
    loss = lambda p, x: torch.tanh(x @ p["w"]).sum()
    with torch.autocast("cpu", torch.bfloat16):
        few, many = [
            measure(clipped_sum, loss, p, xs[:n], max_norm=1.0, **options).peak_bytes for n in (20, 100)
        ]
    assert many <= options.get("bytes", few + 2**12)


def test_memory_of_a_clipped_sum():
    """At most `chunk_size` gradients, the sum, and the gradients of one chunk on the way to it."""
    torch.manual_seed(0)
    w, x = torch.randn(100, 100, dtype=F64), torch.randn(64, 100, dtype=F64)
    one = w.nbytes

    loss = lambda w, x: (w @ x).square().sum()
    peaks = {}
    for size in (None, 2):
        with Storages().known(w, x) as storages:  # parameters that require grad record nothing
            result = clipped_sum(loss, w.requires_grad_(), x, max_norm=1.0, chunk_size=size)
        peaks[size] = storages.peak
        assert storages.live == tensor_bytes(result)
    assert peaks[None] > 64 * one
    assert peaks[2] < 6.2 * one


WAYS = {
    "gradient_norms": gradient_norms,
    "clipped_sum": lambda *args, **options: clipped_sum(*args, max_norm=1.0, **options),
    "noise_scale": noise_scale,
    "influence": lambda loss, w, x, **options: influence(
        loss, w, (x[:40],), (x[:1],), damping=99.0, max_iterations=9, **options
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("samples", [1, 20])
def test_bytes(way, samples):
    """As much as fits is used, and no more. What one sample takes is named."""
    torch.manual_seed(0)
    w, x = torch.randn(30, 30, dtype=F64) / 9, torch.randn(200, 30, dtype=F64)

    loss = lambda w, x: torch.tanh(w @ torch.tanh(w @ x)).square().sum()
    run = lambda **options: WAYS[way](loss, w, x, **options)
    given = measure(run, chunk_size=samples).peak_bytes
    found = measure(run, bytes=given)
    close(found.result, run())
    assert 0.8 * given < found.peak_bytes <= given
    with pytest.raises(funcckpt.OptionError, match="too few for one sample") as error:
        run(bytes=4000)
    run(bytes=int(1.2 * int(re.findall(r"has taken (\d+)", str(error.value))[0])))


def test_the_bytes_that_are_asked_for_are_enough():
    """The second time at the latest: only then it is known what each sample leaves behind."""
    w, x, least = torch.eye(8), torch.ones(64, 8), [100]
    loss = lambda w, x: torch.tanh(w @ x).sum()
    for _ in range(3):
        try:
            clipped_sum(loss, w, x, max_norm=1.0, bytes=least[-1])
            break
        except funcckpt.OptionError as error:
            least.append(int(re.findall(r"has taken (\d+)", str(error))[0]))
    else:
        pytest.fail(str(least))


def test_numbers_of_numpy():
    w, x = torch.eye(2), torch.ones(5, 2)
    found = clipped_sum(lambda w, x: (w @ x).sum(), w, x, max_norm=1.0, chunk_size=np.int64(2))
    close(found.sum, torch.full((2, 2), 2.5))


def test_an_empty_batch():
    _, parameters, loss, x, y = problem()
    for options in ({}, {"chunk_size": 2}, {"bytes": 10**6}):
        result = clipped_sum(loss, parameters, x[:0], y[:0], max_norm=1.0, **options)
        close(result.sum, {name: torch.zeros_like(p) for name, p in parameters.items()})
        norms = gradient_norms(loss, parameters, x[:0], y[:0], **options)
        assert result.norms.shape == norms.shape == (0,) and norms.dtype is F64
    for n in (0, 1):
        with pytest.raises(funcckpt.InputError, match="at least two"):
            noise_scale(loss, parameters, x[:n], y[:n])
    assert influence(loss, parameters, (x, y), (x[:0], y[:0])).shape == (0, 7)
    with pytest.raises(funcckpt.InputError, match="no training sample"):
        influence(loss, parameters, (x[:0], y[:0]), (x, y))


def test_randomness():
    model, parameters, _, x, _ = problem()

    def loss(parameters, x):
        mask = torch.bernoulli(torch.full((4,), 0.5, dtype=F64))
        return functional_call(model, parameters, (x * mask,)).sum()

    with pytest.raises(RuntimeError, match="randomness"):
        gradient_norms(loss, parameters, x)
    with pytest.raises(funcckpt.TransformError, match="reverse mode"):
        torch.func.grad(lambda p: gradient_norms(loss, p, x).sum())(parameters)
    with pytest.raises(funcckpt.TransformError, match="reverse mode"):
        captures = lambda a: lambda p, x: loss(p, a * x)
        torch.func.grad(lambda a: gradient_norms(captures(a), parameters, x, randomness="same").sum())(x[0])
    x = x[:1].expand(20, 4)
    seen = gradient_norms(loss, parameters, x, randomness="different", chunk_size=7)
    assert len(seen.unique()) > 3
    for chunk_size in (None, 7):
        same = gradient_norms(loss, parameters, x, randomness="same", chunk_size=chunk_size)
        close(same, same[:1].expand(20))


def test_noise_scale():
    _, parameters, loss, x, y = problem(20)
    rows = by_hand(parameters, loss, x, y)
    noise = torch.cov(rows.T).trace()
    signal = rows.mean(0).square().sum() - noise / 20
    for chunk_size in (None, 6):
        result = noise_scale(loss, parameters, x, y, chunk_size=chunk_size)
        close(result.noise, noise)
        close(result.signal, signal)
        close(result.scale, noise / signal)
    real = noise_scale(lambda w, x: (w * x).sum().sin(), torch.ones(4, dtype=F64), x)
    two = torch.ones(2, dtype=torch.complex128) * (1 + 1j)
    found = noise_scale(lambda z, x: (torch.view_as_real(z).flatten() * x).sum().sin(), two, x)
    close(found.noise, real.noise)


def test_influence_of_a_model():
    """Parameters in a dict, that require grad, in a module with `Remat`; the Hessian by plain autograd."""
    model, parameters, loss, x, y = problem(6)
    u, v = x[:2] + 1, y[:2]
    w = [*parameters.values()]
    slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), w, create_graph=True)
    slopes = torch.cat([g.flatten() for g in slopes])
    seconds = [torch.autograd.grad(g, w, retain_graph=True, materialize_grads=True) for g in slopes]
    hessian = torch.stack([torch.cat([g.flatten() for g in row]) for row in seconds])
    damping = float(1 - torch.linalg.eigvalsh(hessian)[0])
    rows, others = by_hand(parameters, loss, x, y), by_hand(parameters, loss, u, v)
    actual = influence(loss, parameters, (x, y), (u, v), damping=damping, tolerance=1e-12, chunk_size=4)
    damped = hessian + damping * torch.eye(len(hessian), dtype=F64)
    close(actual, -others @ torch.linalg.solve(damped, rows.T))
    assert not actual.requires_grad


def test_influence_of_a_model_with_attention():
    """Also with the kernels that torch has no forward mode of."""

    def loss(w, x, attention=nn.functional.scaled_dot_product_attention):
        x = x[None, None]
        return (attention(x * w, x, x).sum() - 1).square() + w.square().sum()

    by_formulas = lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v
    w, x = torch.linspace(0.5, 1, 4, dtype=F64), torch.randn(3, 2, 4, dtype=F64)
    expected = influence(lambda w, x: loss(w, x, by_formulas), w, (x,), (x[:2],), damping=50)
    close(influence(loss, w, (x,), (x[:2],), damping=50), expected)


def test_influence_errors():
    w, x = torch.zeros(3, dtype=F64), torch.randn(12, 3, dtype=F64)
    loss = lambda w, x: (x @ w - 1).square()
    with pytest.raises(funcckpt.FuncckptError, match=r"not positive definite.*larger damping"):
        influence(lambda w, x: -loss(w, x), w, (x,), (x,))
    with pytest.raises(funcckpt.FuncckptError, match=r"in 1 iterations.*max_iterations"):
        influence(loss, w, (x,), (x,), max_iterations=1, tolerance=1e-9)
    with pytest.raises(funcckpt.InputError, match=r"train and test are tuples"):
        influence(loss, w, (x,), x)
    for run in (lambda *of: clipped_sum(*of, x, max_norm=1.0), lambda *of: influence(*of, (x,), (x,))):
        with pytest.raises(
            funcckpt.InputError, match=r"has Linear in it.*pass dict\(module\.named_parameters"
        ):
            run(loss, nn.Linear(3, 3))
        with pytest.raises(funcckpt.InputError, match="there are no parameters"):
            run(loss, {})
        with pytest.raises(funcckpt.InputError, match="and a sample, not Tensor"):
            run(w, w)


@pytest.mark.parametrize(
    "batch, options, error, message",
    [
        ((torch.ones(2, 3), torch.ones(3)), {}, funcckpt.InputError, r"float32\[2, 3\], float32\[3\]"),
        ((torch.ones(2, 3),), {"bytes": -1.5}, funcckpt.OptionError, r"bytes=-1\.5"),
        ((torch.ones(2, 3),), {"eps": -1.0}, funcckpt.OptionError, r"eps=-1\.0 is not a positive number"),
        (
            (torch.ones(2, 3),),
            {"max_norm": torch.tensor(-1.0)},
            funcckpt.OptionError,
            r"max_norm=-1\.0 is not",
        ),
        ((torch.ones(2, 3),), {"max_norm": None}, funcckpt.OptionError, "max_norm=None is not a positive"),
        ((torch.ones(2, 3),), {"max_norm": "1"}, funcckpt.OptionError, "max_norm='1' is not a positive"),
        ((torch.ones(2, 3),), {"bytes": 9, "chunk_size": 2}, funcckpt.OptionError, "not both"),
        ((), {}, funcckpt.InputError, "no tensor at all"),
        ((torch.ones(2, 3), {"mask": None}), {}, funcckpt.InputError, r"float32\[2, 3\], NoneType\. Put"),
        ((torch.ones(2, 3),), {"chunk_size": 0}, funcckpt.OptionError, "chunk_size=0"),
        ((torch.ones(2, 3),), {"max_norm": float("nan")}, funcckpt.OptionError, "max_norm"),
    ],
)
def test_errors(batch, options, error, message):
    with pytest.raises(error, match=message):
        clipped_sum(lambda w, *xs: w.sum(), torch.ones(3), *batch, **{"max_norm": 1.0, **options})


class Own(nn.Module):
    """A layer for which Opacus has no formula, but uses torch.func."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.weight).sin() @ self.weight


def by_opacus(model, x, y, max_norm):
    opacus = pytest.importorskip("opacus", reason="needs the extra `models`")
    model = opacus.GradSampleModule(model)
    sgd, options = (
        torch.optim.SGD(model.parameters(), 0.1),
        {"noise_multiplier": 0.0, "max_grad_norm": max_norm},
    )
    optimizer = opacus.optimizers.DPOptimizer(sgd, expected_batch_size=len(x), **options)
    nn.functional.cross_entropy(model(x).mean(1), y).backward()
    optimizer.clip_and_accumulate()
    return {name.removeprefix("_module."): p.summed_grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_the_clipped_sum_is_that_of_opacus(chunk_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), Own(), nn.Linear(4, 3)).double()
    x, y = torch.randint(0, 9, (10, 6)), torch.randint(0, 3, (10,))
    wrapped = apply_remat(copy.deepcopy(model), (Own, nn.LayerNorm))

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(wrapped, parameters, (x[None],)).mean(1), y[None])

    parameters = dict(wrapped.named_parameters())
    bound = float(gradient_norms(loss, parameters, x, y).median())
    expected = by_opacus(copy.deepcopy(model), x, y, bound)
    checkpointed = by_opacus(apply_remat(model, Own), x, y, bound)  # whose sampler runs a copy of the layer
    actual = clipped_sum(loss, parameters, x, y, max_norm=bound, chunk_size=chunk_size).sum
    for found in (actual, checkpointed):
        close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "wrap",
    [Remat, funcckpt.remat, lambda f: lambda x: funcckpt.checkpoint(f, x)],
    ids=["Remat", "remat", "checkpoint"],
)
def test_hooks_that_collect_gradients_for_each_sample_are_refused_inside(wrap):
    """They would run again. Around the checkpoint, in evaluation and without a gradient they do no harm."""
    opacus = pytest.importorskip("opacus", reason="needs the extra `models`")
    model = nn.Sequential(Remat(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    opacus.GradSampleModule(model)
    x = torch.ones(3, 2)
    with pytest.raises(funcckpt.InputError, match=r"GradSampleModule on a Linear.*clipped_sum"):
        wrap(model[1])(x)
    with pytest.raises(funcckpt.InputError, match="before Opacus' GradSampleModule"):
        apply_remat(model, nn.Linear)
    with torch.no_grad():
        wrap(model[1])(x)
    wrap(model[1].eval())(x)
    model[0](x).sum().backward()
    assert model[0].weight.grad_sample.shape == (3, 2, 2)


def test_influence_has_no_derivative_in_reverse_mode():
    """In forward mode it has; and samples of a vmap would stop at different times."""
    q, mean, x = lambda m, x: (m - x).square(), torch.tensor(3.0, dtype=F64), torch.tensor([1.0, 2.0, 6.0])
    f = lambda t: influence(q, mean, (x.double() * t,), (torch.zeros(1, dtype=F64),)).sum()
    one = torch.ones((), dtype=F64)
    with pytest.raises(funcckpt.TransformError, match="influence: the results have no derivative in reverse"):
        torch.func.grad(f)(one)
    step = 1e-6
    close(torch.func.jacfwd(f)(one), (f(one + step) - f(one - step)) / (2 * step), rtol=1e-5, atol=1e-5)
    with pytest.raises(funcckpt.TransformError, match="influence: vmap's samples"):
        torch.func.vmap(f)(torch.ones(2, dtype=F64))
    with pytest.raises(funcckpt.OptionError, match="tolerance=-1 is not a positive number"):
        influence(q, mean, (x,), (x,), tolerance=-1)


def test_options_that_are_tensors_or_infinite():
    loss, x = lambda w, x: (w * x).sum(), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    sums = lambda bound, **options: clipped_sum(loss, torch.zeros(2), x, max_norm=bound, **options).sum
    close(sums(torch.tensor(1.0), eps=torch.tensor(1e-6), bytes=float("inf")), sums(1.0))
    close(torch.func.vmap(sums)(torch.tensor([1.0, 2.0])), torch.stack([sums(1.0), sums(2.0)]))
    close(sums(float("inf")), x.sum(0))
    with_eps = lambda eps: sums(1.0, eps=eps)
    close(torch.func.vmap(with_eps)(torch.tensor([1e-6, 1.0])), torch.stack([with_eps(1e-6), with_eps(1.0)]))


def test_a_tensor_that_a_transform_has_left_behind_is_none_of_the_loss():
    left, x = {}, torch.tensor([1.0, 2.0], dtype=F64)
    torch.func.grad(lambda a: left.update(a=a) or a.sin())(torch.ones((), dtype=F64))
    loss = lambda m, x: (m - x).square() + len(left) * 0
    found = lambda a: influence(loss, x.mean(), (x,), (x[:1],)).sum() * 0 + a
    assert torch.func.grad(found)(torch.ones((), dtype=F64)) == 1
