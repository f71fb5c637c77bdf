"""Buffers that f updates: running statistics, averages, codebooks. They are read as of the call, and updated
once: by the forward.
"""

from functools import partial

import pytest
import torch
from oracles import F64, FORWARD, REVERSE, compare, tensor, total
from support import WRAPS, assert_same, no_remat
from torch import nn
from torch.func import functional_call, grad, hessian, vmap
from torch.nn import functional as F

from funcckpt import MutationError, policies, remat
from funcckpt.core.dispatch import program_of
from funcckpt.meter import measure


@pytest.fixture(params=WRAPS)
def same(request):
    """`run(wrap)` gives what it gives without a checkpoint."""

    def compared(run):
        results = []
        for wrap in (WRAPS[request.param], no_remat):
            torch.manual_seed(0)
            results.append(run(wrap))
        assert_same(*results)

    return compared


rows = lambda n=8: torch.randn(n, 3, dtype=F64, requires_grad=True)
NORMS = {
    "data": lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False, dtype=F64), nn.Linear(3, 3, dtype=F64)),
    "affine": lambda: nn.Sequential(nn.Linear(3, 3, dtype=F64), nn.BatchNorm1d(3, dtype=F64)),
    "cumulative": lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=None, dtype=F64), nn.Tanh()),
    "instance": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.Conv1d(3, 4, 3, padding=2, dtype=F64),
        nn.InstanceNorm1d(4, track_running_stats=True, dtype=F64),
    ),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("order", [1, 2])
def test_statistics_are_updated_once(same, norm, depth, order):
    """One forward, one update; as many recomputations as there may be, none."""

    def run(wrap):
        model, x, w = NORMS[norm](), rows(), rows(1)
        wrt = [w, x, *[p for p in model.parameters() if p.requires_grad]]

        at = lambda depth, x: ((wrap(at)(depth - 1, x) if depth else model(x)) * w[0, 0]).sin()
        y = wrap(at)(depth, x)
        first = torch.autograd.grad(y.sum(), wrt, create_graph=True, allow_unused=True)
        model.eval()
        again = sum(g.square().sum() for g in first if g is not None) if order == 2 else y.sum()
        second = torch.autograd.grad(again, wrt, allow_unused=True)
        return [*model.buffers()], [None if g is None else g.detach() for g in first], second

    same(run)


class Average(nn.Module):
    """Subtracts a running mean, and updates it before."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("mean", torch.ones(3, dtype=F64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.how = how

    def forward(self, x):
        now = x.detach().mean(0)
        if self.how == "in place":
            self.mean.mul_(0.9).add_(now, alpha=0.1)
        else:
            self.mean = self.mean * 0.9 + now * 0.1
        self.calls += 1
        return (x - self.mean).tanh() * self.mean.exp() / float(self.calls)


class Reads(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.norm, self.when = nn.BatchNorm1d(3, dtype=F64), when

    def forward(self, x):
        norm = self.norm
        if self.when == "after":
            return norm(x) * norm.running_var.exp() * float(norm.num_batches_tracked)
        scale = norm.running_var + norm.num_batches_tracked
        return norm(x) * scale


class Codes(nn.Module):
    """Buffers of other shapes, of which one keeps its value."""

    def __init__(self, adjacency=None):
        super().__init__()
        self.register_buffer("codes", torch.ones(2, 3, dtype=F64))
        self.register_buffer("seen", torch.tensor([True]))
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        self.seen.fill_(True)
        y = (x - self.codes.clone().sum(0)).tanh()
        self.codes.mul_(0.9).add_(0.1)
        return y if self.adjacency is None else torch.sparse.mm(self.adjacency, y)


MODULES = {
    "codes": Codes,
    "sparse": lambda: Codes(torch.eye(8, dtype=F64).to_sparse()),
    "in place": lambda: Average("in place"),
    "assigned": lambda: Average("assigned"),
    "read before": lambda: Reads("before"),
    "read after": lambda: Reads("after"),
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("nested", [False, True])
def test_buffers_that_f_updates(same, module, nested):
    def run(wrap):
        m, x = MODULES[module](), rows()
        f = (lambda x: wrap(m)(x).exp()) if nested else m
        f = wrap(f)
        y = f(f(x))
        return torch.autograd.grad(y.sin().sum(), [x, *m.parameters()], allow_unused=True), [*m.buffers()]

    same(run)


def test_evaluation_between_forward_and_backward(same):
    """The recomputation runs with the statistics of its forward, whatever happened since."""

    def run(wrap):
        model = NORMS["affine"]()
        f = wrap(model)
        first = f(rows())
        f(rows())
        model.eval()
        f(rows())
        model.train()
        first.sin().sum().backward()
        return [*model.buffers()], [p.grad for p in model.parameters()]

    same(run)


@pytest.mark.parametrize("given", ["own", "captured", "argument"])
def test_an_update_that_leaves_a_value_as_it_was(same, given):
    """The first variance is 1, as is the running one; the second call comes before the backward."""

    def run(wrap):
        w, norm = torch.ones((), dtype=F64, requires_grad=True), nn.BatchNorm1d(1, dtype=F64)
        norm.register_buffer("mask", torch.ones(2, 2))
        buffers = {name: b.clone() for name, b in norm.named_buffers()}
        if given == "own":
            f = lambda x, _: norm(x * w).sin()
        else:
            f = lambda x, own: functional_call(norm, own or buffers, (x * w,)).sin()
        xs = torch.tensor([[0.0, 2, 2, 2], [0, 5, 1, 2]], dtype=F64)
        f, of = wrap(f), buffers if given == "argument" else None
        y = torch.stack([f(x[:, None], of) for x in xs]).sum()
        y.backward()
        return w.grad, list(norm.buffers()), buffers

    same(run)


class Causal(nn.Module):
    """A block with its mask, as in nanoGPT."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(1024, 1024).tril())

    def forward(self, x):
        mask = self.mask[: len(x), : len(x)]
        return x + (x @ x.mT).masked_fill(mask == 0, -torch.inf).softmax(-1) @ self.linear(x)


def test_large_tables_are_not_copied():
    """The model is in training, and its buffers are arguments, as in torch's tutorial of per-sample gradients."""
    model, x = nn.Sequential(*[Causal() for _ in range(4)]), torch.ones(2, 64, 4)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def peak(wrap):
        def loss(parameters, buffers, x):
            for i, block in enumerate(model):
                of = lambda given, i=i: {k[2:]: v for k, v in given.items() if k.startswith(f"{i}.")}
                call = lambda p, b, x, block=block: functional_call(block, (p, b), (x,))
                x = wrap(call)(of(parameters), of(buffers), x)
            return x.sum()

        return measure(vmap(grad(loss), (None, None, 0)), parameters, buffers, x).peak_bytes

    assert peak(remat) < 0.6 * peak(lambda f: f) < buffers["0.mask"].nbytes


def test_only_statistics_are_copied_beside_an_update():
    norm = nn.BatchNorm1d(3, dtype=F64)
    norm.register_buffer("mask", torch.ones(4, 4, dtype=F64))
    y = remat(lambda x: norm(x) * norm.mask[0, 0])(tensor(4, 3, requires_grad=True))
    held = program_of(y.grad_fn).source.kept_tensors()
    assert sorted(x.numel() for x in held if not any(x is b for b in norm.buffers())) == [1, 3, 3, 3, 3]


def test_updates_at_a_level_inside_of_another_checkpoint():
    def run(wrap):
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3, dtype=F64))
        inner = lambda x: wrap(layer)(x).square().sum()
        loss = wrap(lambda x: torch.func.grad(inner)(x).sin().sum())
        return torch.func.grad(loss)(tensor(4, 3)).detach(), [b.clone() for b in layer.buffers()]

    assert_same(run(remat), run(no_remat))


class Outer(nn.Module):
    def __init__(self, wrap, model, before):
        super().__init__()
        self.model, self.wrap, self.before = model, wrap, before

    def forward(self, x):
        for _ in range(self.before):
            x = self.model(x)
        return self.wrap(self.model)(x)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("transform", ["grad", "grad_grad", "vjp", "jvp", "vmap_grad"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("last", [lambda: nn.BatchNorm1d(3, dtype=F64), Codes], ids=["norm", "codes"])
@pytest.mark.parametrize("before", [0, 1])  # a plain call saves the statistics
def test_statistics_under_transforms(wrap, transform, given, last, before):
    """The module's own; or made and written to inside of the transform, which torch allows under vmap, too."""

    def run(wrap):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 3, dtype=F64), last())
        own = {name: b.clone() for name, b in model.named_buffers()}
        other = model[0].weight.detach()

        def loss(bias):
            zero = bias.detach().sum() * 0
            buffers = {name: b + zero.to(b.dtype) for name, b in own.items()} if given else {}
            state = {"0.bias": bias, "0.weight": other * bias.exp(), **buffers}
            state = {f"model.{name}": x for name, x in state.items()}
            y = functional_call(Outer(wrap, model, before), state, (tensor(4, 3),))
            return total(y) + sum(b.detach().sum() for b in buffers.values())

        return (REVERSE | FORWARD)[transform](loss, tensor(3)), [b.clone() for b in model.buffers()]

    compare(lambda each: run(wrap if each is remat else no_remat), remat, allowed=(MutationError,))


class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=F64))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return (x - self.mean).tanh()


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_an_update_in_a_batch_of_what_another_call_has_read(wrap):
    """Its version tells, though that of the batched tensor does not. Right, or an error."""

    def run(wrap):
        module = Centers()

        def both(x, mean):
            again = lambda x: wrap(lambda m: functional_call(module, {"mean": m}, (x,)))
            mean = mean.clone()
            module.eval()
            y = again(x)(mean)
            module.train()
            return total(y) + total(again(2 * x)(mean).pow(2))

        x = tensor(2, 5, 3, requires_grad=True)
        return torch.autograd.grad(vmap(both)(x, tensor(2, 3, seed=1)).sum(), x)

    compare(lambda each: run(wrap if each is remat else no_remat), remat, allowed=(MutationError,))


@pytest.mark.parametrize("wrap", [*WRAPS.values(), partial(remat, determinism_check="values")])
def test_fake_tensors(wrap):
    """Nobody knows whether their values have changed."""
    with torch._subclasses.FakeTensorMode():
        y, module = rows(), NORMS["affine"]()
        wrap(module)(y).sum().backward()
    assert y.grad.shape == y.shape and module[0].weight.grad.shape == (3, 3)


def test_copies_of_buffers_are_no_operators_of_f():
    """In the recomputation under jacfwd more tensors may be buffers, and are copied, than in the forward."""

    def run(inner, outer):
        def f(x):
            def loss(p):
                scale = torch.ones(3, dtype=F64)  # might be a buffer, since the code below names batch_norm
                return (inner(lambda a: F.batch_norm and a * a * scale)(t) * p).sum()

            t = x.sin()
            return grad(outer(loss))(t) * t

        return hessian(f)(tensor(3))

    assert_same(run(remat, partial(remat, policy=policies.everything_saveable)), run(no_remat, no_remat))


@pytest.mark.parametrize("transform", ["backward", "vmap_grad"])
def test_statistics_that_are_given_and_read(same, transform):
    def run(wrap):
        mean, variance = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)

        def f(x, mean, variance):
            x = F.batch_norm(x.expand(2, 3) * x.new_tensor([[1.0], [2.0]]), mean, variance, training=True)
            return x * (1 + mean.clone())

        if transform == "vmap_grad":  # which allows statistics only of each sample
            mean, variance = mean.repeat(2, 1), variance.repeat(2, 1)
            out = vmap(grad(lambda x, *s: total(wrap(f)(x, *s))))(tensor(2, 3), mean, variance)
        else:
            x = tensor(3, requires_grad=True)
            y = total(wrap(f)(wrap(f)(x, mean, variance)[0], mean, variance))
            out = [torch.autograd.grad(y, x, retain_graph=True) for _ in range(2)]
        return out, mean, variance

    same(run)


def test_a_count_that_is_given_outside_of_a_vmap(same):
    """No level has wrapped the argument, and f writes to it: that is the update, and no change since the call."""

    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(3, 3, dtype=F64)
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x):
            self.count += 1
            return super().forward(x).sin() * self.count

    def run(wrap):
        module, count = Counts(), torch.tensor(0)
        f = wrap(lambda count, x: functional_call(module, {"count": count}, (x,)))
        total(vmap(lambda x: f(count, x))(tensor(2, 3))).backward()
        return module.bias.grad, count

    same(run)


def test_what_looks_like_a_buffer_in_inference_mode():
    """There, to make a copy counts as a write to it."""
    block = nn.Linear(3, 3, dtype=F64)
    block.register_buffer("scale", tensor(3))
    x, shift = tensor(4, 3), tensor(3)
    f = lambda wrap: grad(
        lambda x: wrap(lambda x, s: block(x) * block.scale + s)(x, shift * 0.5).sin().sum()
    )(x)
    with torch.inference_mode():  # where grad of torch 2.11 is zero
        assert torch.allclose(f(remat), f(lambda f: f), rtol=1e-12)
