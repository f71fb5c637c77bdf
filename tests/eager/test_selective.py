"""Selective checkpointing: what is saved, offloaded and recomputed."""

import functools
import os
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support import Storages, assert_same
from torch.utils.checkpoint import CheckpointPolicy

import funcckpt
from funcckpt import checkpoint
from funcckpt.eager import selective
from funcckpt.errors import CheckpointError, MutationError, OptionError

from .implementations import D, Ops, leaf, theirs as torch_checkpoint

mm, sin, dropout = (
    torch.ops.aten.mm.default,
    torch.ops.aten.sin.default,
    torch.ops.aten.native_dropout.default,
)


def theirs(policy, **options):
    return functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy, **options)


def ours(policy, **options):
    return functools.partial(funcckpt.create_selective_checkpoint_contexts, policy, **options)


combinations = pytest.mark.parametrize(
    ("call", "contexts"),
    [(torch_checkpoint, theirs), (checkpoint, theirs), (checkpoint, ours), (torch_checkpoint, ours)],
    ids=["torch", "torch-contexts", "ours", "torch-checkpoint"],
)


def f(x, w):
    return torch.sigmoid((x @ w).sin() @ w) * x


def run(call, x, w, f=f, **options):
    x, w = [t.detach().clone().requires_grad_() for t in (x, w)]
    y = call(f, x, w, **options) if call else f(x, w)
    with Ops() as ops:
        y.sum().backward()
    return [y.detach(), x.grad, w.grad], ops.count


@combinations
@pytest.mark.parametrize("saved", [[], [mm], [sin], [mm, sin]])
def test_list_of_operators(call, contexts, saved):
    x, w = leaf(3, 3), leaf(3, 3)
    plain, without = run(None, x, w)
    actual, ops = run(call, x, w, context_fn=contexts(saved))
    assert_same(actual, plain)
    # The second sigmoid's input is not needed, so the second mm is recomputed if it is not saved.
    assert ops[mm] - without[mm] == (0 if mm in saved else 2)
    assert ops[sin] - without[sin] == (0 if sin in saved else 1)


@combinations
def test_policy_function(call, contexts):
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append((op, ctx.is_recompute))
        return CheckpointPolicy.PREFER_SAVE if op is mm else CheckpointPolicy.MUST_RECOMPUTE

    x, w = leaf(3, 3), leaf(3, 3)
    actual, ops = run(call, x, w, context_fn=contexts(policy))
    assert_same(actual, run(None, x, w)[0])
    if contexts is ours:  # torch 2.11 asks in the recomputation again
        assert sum(op is mm for op, _ in seen) == 2
    assert (mm, False) in seen
    assert ops[sin] == 1 + run(None, x, w)[1][sin]


def test_policy_sees_the_output_and_may_answer_by_a_boolean():
    outputs = []

    def policy(ctx, op, *args, **kwargs):
        outputs.append(ctx.op_output)
        return op is mm

    x, w = leaf(3, 3), leaf(3, 3)
    _, ops = run(checkpoint, x, w, context_fn=ours(policy))
    assert any(isinstance(o, torch.Tensor) and torch.equal(o, (x @ w).detach()) for o in outputs)
    assert ops[mm] == run(None, x, w)[1][mm]


def test_bytes_that_are_kept():
    x, w = leaf(32, 32), leaf(32, 32)
    n = x.nbytes
    for saved, kept in (([], 0), ([mm], 2), ([mm, sin], 3)):
        with Storages().known(x, w) as storages:
            y = checkpoint(f, x, w, context_fn=ours(saved))
            assert storages.live == n * (1 + kept)
            y.sum().backward()
            del y
        x.grad = w.grad = None


@combinations
def test_random_operators_that_are_saved(call, contexts):
    def f(x, w):
        return F.dropout(x @ w, 0.5).sin() * torch.rand_like(x)

    def seeded(call, **options):
        torch.manual_seed(5)
        x = torch.ones(8, 8, dtype=D)
        return run(call, x, x, f=f, **options)[0]

    saved = [torch.ops.aten.rand_like.default, mm]
    assert_same(seeded(call, context_fn=contexts(saved)), seeded(None))


@combinations
def test_several_outputs(call, contexts):
    def f(x, w):
        values, _ = torch.sort(x @ w)
        return values.sin()

    x, w = leaf(3, 3), leaf(3, 3)
    actual, _ = run(call, x, w, f=f, context_fn=contexts([torch.ops.aten.sort.default]))
    assert_same(actual, run(None, x, w, f=f)[0])


@combinations
def test_mutation_of_what_is_saved(call, contexts):
    def f(x, w):
        y = (x @ w).sin()
        z = y.exp()
        y.mul_(2)
        return z * x

    x, w = leaf(3, 3), leaf(3, 3)
    if contexts is theirs:
        with pytest.raises(RuntimeError, match="has been mutated"):
            run(call, x, w, f=f, context_fn=contexts([sin]))
        run(call, x, w, f=f, context_fn=contexts([sin], allow_cache_entry_mutation=True))
    else:  # it is run again
        assert_same(run(call, x, w, f=f, context_fn=contexts([sin]))[0], run(None, x, w, f=f)[0])


@combinations
def test_a_second_backward(call, contexts):
    x, w = leaf(3, 3), leaf(3, 3)
    y = call(f, x, w, context_fn=contexts([mm])).sum()
    first = torch.autograd.grad(y, [x, w], retain_graph=True)
    if contexts is theirs:
        with pytest.raises(RuntimeError, match=r"an extra time|only allowed to backward once"):
            y.backward()
    else:  # runs all operators
        assert_same(torch.autograd.grad(y, [x, w]), first)


@pytest.mark.parametrize("call", [checkpoint, torch_checkpoint])
def test_other_operators_in_the_recomputation(call, monkeypatch):
    monkeypatch.setenv("FUNCCKPT_TEST_FIRST", "yes")

    def f(x, w):
        first = os.environ.pop("FUNCCKPT_TEST_FIRST", None)
        return ((x @ w).sin() if first else (x @ w).cos()).exp()

    with pytest.raises(RuntimeError, match=r"cos.*encountered during backward"):
        run(call, leaf(3, 3), leaf(3, 3), f=f, context_fn=ours([mm]))


def test_what_is_no_policy():
    create = funcckpt.create_selective_checkpoint_contexts
    with pytest.raises(OptionError, match=r"OpOverload.*aten.mm.default"):
        create([torch.ops.aten.mm])
    with pytest.raises(TypeError, match="either a function or a list of ops"):
        create(3)
    assert issubclass(OptionError, ValueError) and issubclass(MutationError, RuntimeError)
    assert issubclass(CheckpointError, torch.utils.checkpoint.CheckpointError)


def test_dropped_when_the_graph_is():
    x, w = leaf(3, 3), leaf(3, 3)
    refs = []

    def policy(ctx, op, *args, **kwargs):
        if op is mm:
            refs.append(weakref.ref(ctx.op_output.untyped_storage()))
        return op is mm

    y = checkpoint(f, x, w, context_fn=ours(policy))
    assert [r() is not None for r in refs] == [True, True]
    del y
    assert [r() for r in refs] == [None, None]


# -- offload ------------------------------------------------------------------------------------------


def offload(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_CPU_OFFLOAD if op is mm else CheckpointPolicy.PREFER_RECOMPUTE


def test_offloaded_bytes_leave_and_come_back(monkeypatch):
    """With a stand-in for the question whether a tensor is on an accelerator."""
    moved = []
    monkeypatch.setattr(selective, "is_far", lambda x: moved.append(weakref.ref(x.untyped_storage())) or True)
    x, w = leaf(32, 32), leaf(32, 32)
    plain, without = run(None, x, w)
    y = checkpoint(f, x, w, context_fn=ours(offload))
    assert len(moved) == 2 and all(ref() is None for ref in moved)  # the originals are gone
    with Ops() as ops:
        actual = torch.autograd.grad(y.sum(), [x, w])
    assert_same(list(actual), plain[1:])
    assert ops.count[mm] == without[mm]


def test_on_a_cpu_offloading_is_saving():
    x, w = leaf(32, 32), leaf(32, 32)
    actual, ops = run(checkpoint, x, w, context_fn=ours(offload))
    plain, without = run(None, x, w)
    assert_same(actual, plain)
    assert ops[mm] == without[mm]


def test_offloaded_views_keep_their_strides(monkeypatch):
    monkeypatch.setattr(selective, "is_far", lambda x: True)
    x = torch.randn(3, 4, dtype=D).t()
    away = selective.Offloaded(x)
    back = away.back(away.host).get()
    assert torch.equal(back, x) and back.stride() == x.stride() and back.data_ptr() != x.data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves bytes off a GPU")
def test_offload_on_a_gpu():
    x, w = [torch.randn(1024, 1024, device="cuda", requires_grad=True) for _ in range(2)]
    sizes = {}
    for name, policy in (("save", [mm]), ("offload", offload)):
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


def test_random_streams_that_are_not_preserved_are_left_alone():
    x = leaf(3, 3)
    context_fn = ours([torch.ops.aten.rand_like.default])
    y = checkpoint(
        lambda x: (torch.rand_like(x) * x).sin(), x, context_fn=context_fn, preserve_rng_state=False
    )
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_mutation_under_another_version_counter():
    """A product with more dimensions is an unsafe view of that of matrices, and counts for itself."""

    def f(x, w):
        y = x @ w
        y.mul_(2)
        return y.sin()

    x, w = leaf(2, 3, 3), leaf(3, 3)
    assert_same(run(checkpoint, x, w, f=f, context_fn=ours([mm]))[0], run(None, x, w, f=f)[0])


def test_hooks_of_the_caller_do_not_see_what_is_kept():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        checkpoint(lambda x, w: (x @ w).sin() * x, leaf(3, 5), leaf(5, 5), context_fn=ours([mm]))
    assert len(packed) == 2  # the arguments
    with pytest.raises(OptionError, match="MUST_CPU_OFFLOAD"):
        checkpoint(f, leaf(3, 3), leaf(3, 3), context_fn=ours([mm]), respect_saved_tensors_hooks=True)


def test_compiled():
    def loss(x, w):
        return checkpoint(f, x, w, context_fn=ours([mm])).sum()

    x, w = leaf(3, 3), leaf(3, 3)
    compiled = torch.compile(loss, backend="aot_eager")
    assert_same(
        list(torch.autograd.grad(compiled(x, w), [x, w])), list(torch.autograd.grad(f(x, w).sum(), [x, w]))
    )


@pytest.mark.parametrize("policy", [[sin], lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE])
def test_a_saved_result_may_be_changed(policy):
    """It is run again. Torch's is handed out as it is then, and changed again: other gradients, unsaid."""

    def f(x):
        y = x.sin()
        y[1:].mul_(2)
        return y.mul_(2).cos().exp()

    x = leaf(3)
    y = checkpoint(f, x, context_fn=ours(policy))
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(f(x).sum(), x))


def test_a_saved_result_that_is_changed_after_the_forward():
    x = leaf(3)
    for allowed in (False, True):
        context_fn = ours([sin], allow_cache_entry_mutation=allowed)
        y, z = checkpoint(lambda x: ((y := x.sin()), y.exp() * x), x, context_fn=context_fn)
        with torch.no_grad():
            y.mul_(2)
        with nullcontext() if allowed else pytest.raises(MutationError, match="inplace operation"):
            z.sum().backward()
