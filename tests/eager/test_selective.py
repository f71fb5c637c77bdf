"""Selective checkpointing: what is saved, offloaded and recomputed."""

import array
import functools
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support import Changing, Storages, assert_same
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

import funcckpt
from funcckpt import checkpoint, checkpoint_scope, policies, remat
from funcckpt.eager import selective
from funcckpt.errors import MutationError, OptionError

from .implementations import Ops, leaf, theirs as torch_checkpoint

aten = torch.ops.aten
mm, sin = aten.mm.default, aten.sin.default
theirs = functools.partial(functools.partial, torch.utils.checkpoint.create_selective_checkpoint_contexts)
ours = functools.partial(functools.partial, funcckpt.create_selective_checkpoint_contexts)
combinations = pytest.mark.parametrize(
    ("call", "contexts"),
    [(checkpoint, theirs), (checkpoint, ours), (torch_checkpoint, ours)],
    ids=["torch-contexts", "ours", "torch-checkpoint"],
)
f = lambda x, w: torch.sigmoid((x @ w).sin() @ w) * x


def offloads_mm(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_CPU_OFFLOAD if op is mm else CheckpointPolicy.PREFER_RECOMPUTE


def run(call, x, w, f=f, **options):
    torch.manual_seed(5)
    x, w = [t.detach().clone().requires_grad_() for t in (x, w)]
    y = call(f, x, w, **options) if call else f(x, w)
    with Ops() as ops:
        y.sum().backward()
    return [y.detach(), x.grad, w.grad, torch.rand(2)], ops.count


# What is saved, and how often the product and the sine run again. The second sigmoid's input is not needed, so
# the second product is recomputed if it is not saved.
POLICIES = {
    "nothing": ([], 2, 1),
    "products": ([mm], 0, 1),
    "sines": ([sin], 2, 0),
    "boolean": (lambda ctx, op, *args, **kwargs: op is mm and ctx.op_output is not None, 0, 1),
    "offload": (offloads_mm, 0, 1),
}


@combinations
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_run_again(call, contexts, policy):
    if contexts is theirs and policy in ("boolean", "offload"):
        policy = "products"  # torch has neither
    (saved, products, sines), (x, w) = POLICIES[policy], (leaf(3, 3), leaf(3, 3))
    plain, without = run(None, x, w)
    actual, ops = run(call, x, w, context_fn=contexts(saved))
    assert_same(actual, plain)
    assert (ops[mm] - without[mm], ops[sin] - without[sin]) == (products, sines)


def random_operators(x, w):
    return F.dropout(x @ w, 0.5).sin() * torch.rand_like(x)


def several_outputs(x, w):
    values, _ = torch.sort(x @ w)
    return values.sin()


def writes_to_what_is_saved(x, w):
    y = (x @ w).sin()
    z = y.exp()
    y.mul_(2)
    return z * x


def writes_to_parts(x, w):
    """Torch's is handed out as it is then, and changed again: other gradients, unsaid."""
    y = (x * w[0]).sin()
    y[1:].mul_(2)
    return y.mul_(2).cos().exp()


def writes_under_another_version_counter(x, w):
    """A product with more dimensions is an unsafe view of that of matrices, and counts for itself."""
    y = x.expand(2, 3, 3) @ w
    y.mul_(2)
    return y.sin()


SAVED = [mm, sin, aten.sort.default, aten.rand_like.default, aten.exp.default]
PROGRAMS = [
    random_operators,
    several_outputs,
    writes_to_what_is_saved,
    writes_to_parts,
    writes_under_another_version_counter,
]


@pytest.mark.parametrize(
    "saved", [SAVED, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE], ids=["list", "all"]
)
@pytest.mark.parametrize("f", PROGRAMS)
@pytest.mark.parametrize("call", [checkpoint, torch_checkpoint])
def test_as_without(call, f, saved):
    x, w = leaf(3, 3), leaf(3, 3)
    assert_same(run(call, x, w, f=f, context_fn=ours(saved))[0], run(None, x, w, f=f)[0])


@pytest.mark.parametrize("call", [checkpoint, torch_checkpoint])
def test_a_second_backward(call):
    """It runs all operators."""
    x, w = leaf(3, 3), leaf(3, 3)
    y = call(f, x, w, context_fn=ours([mm])).sum()
    first = torch.autograd.grad(y, [x, w], retain_graph=True)
    with Ops() as ops:
        assert_same(torch.autograd.grad(y, [x, w]), first)
    assert ops.count[mm] == run(None, x, w)[1][mm] + 2


def test_bytes_that_are_kept():
    x, w = leaf(32, 32), leaf(32, 32)
    for saved, kept in (([], 0), ([mm], 2), ([mm, sin], 3)):
        with Storages().known(x, w) as storages:
            y = checkpoint(f, x, w, context_fn=ours(saved))
            assert storages.live == x.nbytes * (1 + kept)
            if kept != 2:
                y.sum().backward()
            del y
            x.grad = w.grad = None
            assert storages.live == 0


def with_jitter(x, w):
    a = (x @ w).sin()
    a = a @ a.T
    try:
        root = torch.linalg.cholesky(a - torch.eye(3, dtype=a.dtype) * 9)
    except torch.linalg.LinAlgError:
        root = torch.linalg.cholesky(a + torch.eye(3, dtype=a.dtype))
    return (root @ x).sin()


@pytest.mark.parametrize("call", [checkpoint, torch_checkpoint])
@pytest.mark.parametrize("saved", [[mm], policies.everything_saveable])
def test_an_operator_that_raises_what_f_catches(call, saved):
    x, w = leaf(3, 3), leaf(3, 3)
    assert_same(run(call, x, w, f=with_jitter, context_fn=ours(saved))[0], run(None, x, w, f=with_jitter)[0])


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize itself
def test_a_graph_that_f_traces_holds_no_kept_values():
    def f(x, w):
        y, push = torch.func.linearize(lambda x: (x @ w).sin(), x)
        return y * push(w)

    x, w = leaf(3, 3), leaf(3, 3)
    assert_same(run(checkpoint, x, w, f=f, context_fn=ours([mm]))[0], run(None, x, w, f=f)[0])


def test_a_graph_of_make_fx_holds_no_kept_values():
    gradient = lambda call: lambda x, w: torch.autograd.grad(call(x, w).sum(), [x, w])
    x, w = leaf(3, 3), leaf(3, 3)
    graph = make_fx(gradient(lambda x, w: checkpoint(f, x, w, context_fn=ours([mm]))))(x, w)
    x, w = [t.detach().cos().requires_grad_() for t in (x, w)]
    assert_same(tuple(g.detach() for g in graph(x, w)), gradient(f)(x, w))


@pytest.mark.parametrize("call", [checkpoint, torch_checkpoint])
def test_other_operators_in_the_recomputation(call):
    f = Changing(lambda x, w: (x @ w).sin().exp(), lambda x, w: (x @ w).cos().exp())
    with pytest.raises(RuntimeError, match=r"cos.*encountered during backward"):
        run(call, leaf(3, 3), leaf(3, 3), f=f, context_fn=ours([mm]))


def test_errors():
    create = funcckpt.create_selective_checkpoint_contexts
    with pytest.raises(OptionError, match=r"OpOverload.*aten.mm.default"):
        create([aten.mm])
    with pytest.raises(OptionError, match="either a function or a list of ops"):
        create(3)
    with pytest.raises(OptionError, match="MUST_CPU_OFFLOAD"):
        checkpoint(f, leaf(3, 3), leaf(3, 3), context_fn=ours([mm]), respect_saved_tensors_hooks=True)
    assert issubclass(OptionError, ValueError) and issubclass(MutationError, RuntimeError)
    assert issubclass(funcckpt.CheckpointError, torch.utils.checkpoint.CheckpointError)


@pytest.mark.parametrize("batch", ["none", "vmap"])
def test_a_product_with_a_vector(batch):
    """torch takes a dimension from its result in place, which is no write to its memory, and counts as one."""
    x, w = leaf(2, 3) if batch == "vmap" else leaf(3), leaf(3, 3)
    product = lambda v, w: (v @ w).tanh()
    f = torch.func.vmap(product, (0, None)) if batch == "vmap" else product
    saved, count = run(checkpoint, x, w, f, context_fn=ours([mm, aten.mv.default]))
    plain, without = run(None, x, w, f)
    assert_same(saved, plain)
    assert [count[op] for op in (mm, aten.mv.default)] == [without[op] for op in (mm, aten.mv.default)]


def test_a_saved_result_that_is_changed_after_the_forward():
    x = leaf(3)
    for allowed in (False, True):
        context_fn = ours([sin], allow_cache_entry_mutation=allowed)
        y, z = checkpoint(lambda x: ((y := x.sin()), y.exp() * x), x, context_fn=context_fn)
        with torch.no_grad():
            y.mul_(2)
        with nullcontext() if allowed else pytest.raises(MutationError, match="inplace operation"):
            z.sum().backward()


def test_offloaded_bytes_leave_and_come_back(monkeypatch):
    """With a stand-in for the question whether a tensor is on an accelerator."""
    moved = []
    monkeypatch.setattr(selective, "is_far", lambda x: moved.append(weakref.ref(x.untyped_storage())) or True)
    x, w = leaf(32, 32), leaf(32, 32)
    plain, without = run(None, x, w)
    y = checkpoint(f, x, w, context_fn=ours(offloads_mm))
    assert len(moved) == 2 and all(ref() is None for ref in moved)  # the originals are gone
    with Ops() as ops:
        actual = torch.autograd.grad(y.sum(), [x, w])
    assert_same([y.detach(), *actual], plain[:3])
    assert ops.count[mm] == without[mm]
    away = selective.Offloaded(torch.randn(3, 4).t())
    assert away.back(away.host).get().stride() == (1, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves bytes off a GPU")
def test_offload_on_a_gpu():
    x, w = [torch.randn(1024, 1024, device="cuda", requires_grad=True) for _ in range(2)]
    f(x, w).sum().backward()  # products take memory of their own once
    sizes = {}
    for name, policy in (("save", [mm]), ("offload", offloads_mm)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = checkpoint(f, x, w, context_fn=ours(policy))
        torch.cuda.synchronize()
        sizes[name] = torch.cuda.memory_allocated() - before
        gradients = torch.autograd.grad(y.sum(), [x, w])
        for a, e in zip(gradients, torch.autograd.grad(f(x, w).sum(), [x, w])):
            torch.testing.assert_close(a, e)
        del y, gradients
    assert sizes["save"] - sizes["offload"] == 2 * x.nbytes


def test_hooks_of_the_caller_do_not_see_what_is_kept():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        checkpoint(lambda x, w: (x @ w).sin() * x, leaf(3, 5), leaf(5, 5), context_fn=ours([mm]))
    assert len(packed) == 2  # the arguments


@pytest.mark.parametrize("call", [checkpoint, torch_checkpoint])
@pytest.mark.parametrize("is_cast_before", [True, False])
def test_casts_in_the_cache_of_autocast(call, is_cast_before):
    """Those of the forward are found there, or those of the recomputation."""

    def step(call):
        x, w = [
            torch.randn(4, 4, dtype=torch.float32, generator=torch.Generator().manual_seed(i)) for i in (0, 1)
        ]
        w.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = (x @ w).sum() if is_cast_before else 0.0
            y = y + call(lambda x, w: ((x @ w).tanh() @ w).sum(), x, w)
            if not is_cast_before:
                y.backward()
        return torch.autograd.grad(y, w) if is_cast_before else w.grad

    contexts = ours(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    assert_same(step(functools.partial(call, context_fn=contexts)), step(lambda f, *args: f(*args)))


class Statistics(nn.Module):
    """Normalizes, and then reads the statistics; with the operator of nn.SyncBatchNorm that writes to them."""

    def __init__(self, is_one_operator):
        super().__init__()
        self.norm, self.is_one_operator = nn.BatchNorm1d(4, dtype=torch.float64), is_one_operator

    def forward(self, x):
        mean, var = self.norm.running_mean, self.norm.running_var
        if self.is_one_operator:
            y = self.norm(x)
        else:
            with torch.no_grad():
                center, variance = torch.batch_norm_update_stats(x, mean, var, 0.1)
            y = (x - center) * variance.rsqrt()
        return (y * var.sqrt() + mean).sin() * x


def in_scope(f):
    def run(x):
        with checkpoint_scope():
            return f(x)

    return run


THAT_KEEP = [
    lambda f: lambda x: checkpoint(f, x, context_fn=ours(policies.everything_saveable)),
    lambda f: remat(f, policy=policies.everything_saveable),
    in_scope,
]


@pytest.mark.parametrize("is_one_operator", [False, True])
@pytest.mark.parametrize("wrap", THAT_KEEP)
def test_statistics_that_f_reads_after_their_update(wrap, is_one_operator):
    """No operator that writes is kept, also where its schema does not say that it does."""

    def run(wrap):
        x = torch.linspace(-1, 2, 24, dtype=torch.float64).view(6, 4).requires_grad_()
        f = Statistics(is_one_operator)
        return torch.autograd.grad(wrap(f)(x).sum(), x), f.norm.running_mean, f.norm.running_var

    assert_same(run(wrap), run(lambda f: f))


@pytest.mark.parametrize("form", ["statistic", "view"])
@pytest.mark.parametrize("calls", [1, 2])
def test_statistics_that_a_scope_reads_before_their_update(calls, form):
    """As batch renormalization does, and a convolution with its normalization in training for quantization."""

    def run(wrap):
        norm = nn.BatchNorm1d(4, dtype=torch.float64)
        w = torch.linspace(1, 2, 4, dtype=torch.float64).requires_grad_()

        def f(w):
            var = norm.running_var if form == "statistic" else norm.running_var[None]
            y = torch.linspace(-1, 2, 24, dtype=torch.float64).view(6, 4) * (w / torch.sqrt(var + norm.eps))
            return norm(y) * y

        return torch.autograd.grad(sum([wrap(f)(w).square().sum() for _ in range(calls)]), w)

    assert_same(run(in_scope), run(lambda f: f))


def draws_from_its_own_generator(x):
    generator = torch.Generator().manual_seed(4)
    draw = functools.partial(torch.rand, 4, generator=generator, dtype=torch.float64)
    return (x * draw()).sin() * draw().bernoulli_(0.5, generator=generator) * draw()


@torch.library.custom_op("funcckpt_selective::mask", mutates_args=())
def mask(x: torch.Tensor) -> torch.Tensor:
    return (torch.rand_like(x) > 0.5).to(x.dtype)  # without a tag that says so


def draws_with_an_operator_of_its_own(x):
    y = torch.dropout((x * x * mask(x.detach())).exp(), 0.5, train=True)
    return y * y


def writes_to_a_subclass(x):
    with torch.no_grad():
        two = TwoTensor(x + 1, x * 2)
        two.mul_(2)
        sin = two.sin()
    return (x * sin.a).sin() * sin.b * two.b


def encodes_padded_sequences(x):
    """In evaluation, torch's encoder makes a nested tensor."""
    with torch.random.fork_rng():
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=torch.float64)
        encoder = nn.TransformerEncoder(layer, 1).eval()
    sequences = x.expand(2, 3, 4)
    with torch.no_grad():
        y = encoder(sequences, src_key_padding_mask=torch.tensor([[False, False, True], [False] * 3]))
    return (sequences * y.sum(1, keepdim=True)).sin()


@pytest.mark.parametrize("wrap", THAT_KEEP)
@pytest.mark.parametrize(
    "f",
    [
        draws_from_its_own_generator,
        draws_with_an_operator_of_its_own,
        writes_to_a_subclass,
        encodes_padded_sequences,
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_functions_with_unusual_operators(f, wrap):
    def run(wrap):
        torch.manual_seed(0)
        x = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
        return torch.autograd.grad(wrap(f)(x).sum(), x), torch.rand(1)

    assert_same(run(wrap), run(lambda f: f))


class Quantized(torch.Tensor):
    """A matrix that is computed from what it holds when an operator first reads it."""

    @staticmethod
    def __new__(cls, whole):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float64)

    def __init__(self, whole):
        self.whole, self.scaled = whole, None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def scaled(x):
            x.scaled = x.whole * 0.3 if x.scaled is None else x.scaled
            return x.scaled

        return func(*pytree.tree_map_only(cls, scaled, args), **kwargs or {})


@pytest.mark.parametrize("policy", [policies.everything_saveable, [aten.mul.Tensor]])
def test_a_subclass_that_calls_more_operators_the_first_time(policy):
    """As a DTensor does, of which the policy sees the operators on the whole."""

    def run(wrap):
        w = Quantized(torch.arange(16, dtype=torch.float64).view(4, 4) % 5 - 2)
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()

        def f(x):
            h = (x @ w).sin()
            return (h * x * (h + 1)).sin()

        return torch.autograd.grad(wrap(f)(x).sum(), x)

    wrap = lambda f: lambda x: checkpoint(f, x, context_fn=ours(policy))
    assert_same(run(wrap), run(lambda f: f))


@pytest.mark.parametrize("wrap", THAT_KEEP[:2])
def test_a_write_by_foreach_to_what_f_has_captured(wrap):
    """As of a teacher that is updated in the forward. Torch counts no version of it in a dispatch mode."""
    w = torch.ones(3, dtype=torch.float64)

    def f(x):
        with torch.no_grad():
            torch._foreach_mul_([w], 2.0)
        return (x * w).sin()

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(MutationError, match=r"'w'|closure"):
        wrap(f)(x).sum().backward()


@pytest.mark.parametrize("how", ["contexts", "debug"])
def test_jagged_tensors_are_asked_for_their_size(how):
    """By an operator that torch's dispatcher does not know; an error there ended the process."""
    w = torch.eye(3, dtype=torch.float64, requires_grad=True)
    parts = torch.arange(18.0, dtype=torch.float64).view(6, 3)
    x = torch.nested.nested_tensor_from_jagged(parts, torch.tensor([0, 2, 6]))
    f = lambda x: F.linear(x, w).sin()
    options = {"debug": True} if how == "debug" else {"context_fn": ours(policies.dots_saveable)}
    gradient = lambda y: torch.autograd.grad(y.values().sum(), w)
    assert_same(gradient(checkpoint(f, x, **options)), gradient(f(x)))


def test_what_a_profiler_is_told_may_differ():
    """FSDP2 tells it of more in a backward than in the forward."""
    runs = array.array("q", [0])  # a recomputation does not put it back

    def f(x, w):
        runs[0] += 1
        for _ in range(runs[0]):
            with torch.profiler.record_function("step"):
                pass
        return x.sin() @ w

    x, w = leaf(2, 2), leaf(2, 2)
    y = checkpoint(f, x, w, context_fn=ours([mm]), determinism_check="none")
    y.sum().backward()
    assert runs[0] == 2 and x.grad is not None


@pytest.mark.parametrize(
    "context_fn",
    [lambda: None, lambda: [nullcontext()], "contexts", None],
    ids=["none", "one", "contexts", "no function"],
)
def test_what_is_no_context_fn(context_fn):
    """As the contexts themselves, where a `partial` was forgotten."""
    context_fn = ours(policies.dots_saveable)() if context_fn == "contexts" else context_fn
    with pytest.raises(
        OptionError, match=r"checkpoint\(.*sin\): context_fn must be a function that returns two"
    ):
        checkpoint(torch.sin, leaf(3), context_fn=context_fn)
    checkpoint(torch.sin, leaf(3), context_fn=lambda: (nullcontext() for _ in range(2))).sum().backward()
