"""What each rank of `test_distributed.py` does: `torchrun worker.py`, or with the names of some cases.

The reference is the same model in one process on the whole batch, without checkpoints.
"""

import copy
import itertools
import os
import sys
from datetime import timedelta
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from funcckpt import (
    InputError,
    MutationError,
    checkpoint,
    checkpoint_scope,
    create_selective_checkpoint_contexts as contexts,
    remat,
)
from funcckpt._torch import kernels
from funcckpt.nn import Remat, apply_remat
from funcckpt.per_sample import clipped_sum, gradient_norms
from funcckpt.policies import dots_saveable, everything_saveable

BATCH, WIDTH = 8, 4


class Block(nn.Module):
    """Counts its forwards. The exponential of `scale` is saved, and not itself."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.log_scale = nn.Parameter(torch.zeros(WIDTH))
        self.runs = []

    def forward(self, x):
        self.runs.append(1)
        return x + self.down(torch.tanh(self.up(x * self.log_scale.exp())))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.call = lambda block, x: block(x)

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


whole = lambda x: x.full_tensor() if isinstance(x, DTensor) else x


def steps(model, batches):
    """Gradients of some steps of SGD, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        seen.append({name: whole(p.grad).clone() for name, p in model.named_parameters()})
        optimizer.step()
    return [*seen, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}]


def check(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        got = {name.removeprefix("module."): x for name, x in got.items()}
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


KEPT = {"products": dots_saveable, "everything": everything_saveable}  # by a context_fn


def setup(how):
    """A model with checkpoints, the one without, and three batches."""
    torch.manual_seed(0)
    plain = Model().double()
    batches = torch.randn(3, BATCH, WIDTH, dtype=torch.float64).unbind()
    model = copy.deepcopy(plain)
    if how == "checkpoint":
        model.call = checkpoint
    elif how in KEPT:
        model.call = partial(checkpoint, context_fn=partial(contexts, KEPT[how]))
    elif how == "remat":
        apply_remat(model, Block)
    return model, plain, batches


def share(batches, mesh=None):
    """The samples of this rank."""
    mesh = mesh or whole_mesh()
    return [x.chunk(mesh.size())[mesh.get_local_rank()] for x in batches]


def recomputed(model, forwards=3):
    runs = [len(block.runs) for block in model.blocks]
    assert runs == [2 * forwards] * 3, f"a block was run {runs} times in {forwards} forwards and backwards"


def whole_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


# Of a model with checkpoints: what is called, and what this rank takes of the batches.


def ddp(model, **options):
    return DistributedDataParallel(model, **options), share


def fsdp(model, inner=False, reshard=True, first=False):
    """`inner`: layers inside of a block are sharded by themselves; `first`: before checkpoints are put around."""
    mesh = whole_mesh()
    for block in model.blocks:
        if inner:
            fully_shard(block.up, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    if first:
        apply_remat(model, Block)
        assert all(isinstance(block, Remat) for block in model.blocks)
    return model, share


def tensor_parallel(model, mesh=None):
    for block in model.blocks:
        parallelize_module(block, mesh or whole_mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, list


def sharded_tensor_parallel(model):
    """Both at a time, on a mesh of two dimensions: pairs of ranks split the blocks, and shard the halves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data"])
    return model, lambda batches: share(batches, mesh["data"])


SHARDED = [
    *[(ddp, options) for options in ({}, {"find_unused_parameters": True}, {"static_graph": True})],
    *[(fsdp, {"inner": inner, "reshard": reshard}) for inner in (False, True) for reshard in (True, False)],
    (fsdp, {"first": True}),
    (tensor_parallel, {}),
    (sharded_tensor_parallel, {}),
]


def training():
    for shard, options in SHARDED:
        kept = KEPT if "tensor" in shard.__name__ or "inner" in options else ()
        for how in ("nothing",) if "first" in options else ("remat", "checkpoint", *kept):
            model, plain, batches = setup(how)
            called, share_of = shard(model, **options)
            check(steps(called, share_of(batches)), steps(plain, batches))
            recomputed(model)


def fsdp_inside():
    """What FSDP2 does around each call of a module would not be part of a recomputation."""
    model, _, batches = setup("nothing")
    block = model.blocks[0]
    fully_shard(block.up, mesh=whole_mesh())
    apply_remat(model, Block, policy=dots_saveable)
    for call in (
        block,
        remat(lambda x: block.up(x)),
        lambda x: checkpoint(block.up, x, policy=dots_saveable),
    ):
        try:
            call(batches[0].requires_grad_())
        except InputError as error:
            assert "calls a FSDPLinear" in str(error), error
        else:
            raise AssertionError("no error")


class Calls(nn.Module):
    """A block, called as a checkpoint calls it."""

    def __init__(self, call, block):
        super().__init__()
        self.call, self.block = call, block

    def forward(self, x):
        return self.call(self.block, x)


def fsdp1_inside():
    """Its hook is on a graph node to which those of a recomputation may not lead."""
    calls = {
        "hooks": checkpoint,
        "remat": lambda block, x: remat(block)(x),
        "policy": partial(checkpoint, policy=dots_saveable),
    }
    for by, dtype, is_root in itertools.product(calls, (None, torch.bfloat16), (True, False)):
        casts = MixedPrecision(param_dtype=dtype)
        options = {"device_id": torch.device("cpu"), "use_orig_params": True, "mixed_precision": casts}
        block = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH), **options)
        model = Calls(calls[by], block)
        model = model if is_root else FullyShardedDataParallel(model, **options)
        refused = False
        try:
            model(torch.ones(2, WIDTH, requires_grad=True)).float().square().sum().backward()
        except InputError as error:
            refused = "calls a FullyShardedDataParallel" in str(error)
        assert refused == (by != "hooks" and (is_root or dtype is not None)), (by, dtype, is_root)
        if not refused:
            with FullyShardedDataParallel.summon_full_params(block, with_grads=True):
                assert any([p.grad is not None for p in block.parameters()])


def functional_call_of_distributed_tensors():
    """Other distributed parameters in the forward than in the module when the backward recomputes."""
    model, plain, (x, *_) = setup("remat")
    tensor_parallel(model)

    moved = lambda p: (p.detach() + 0.1).requires_grad_()
    results = []
    for m in (model, plain):
        parameters = {name: moved(p) for name, p in m.named_parameters()}
        loss = functional_call(m, parameters, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        results.append([{n: whole(g) for n, g in zip(parameters, gradients, strict=True)}])
    check(*results)
    recomputed(model, 1)


def per_sample():
    model, plain, (x, *_) = setup("remat")

    loss_of = lambda m: lambda parameters, x: functional_call(m, parameters, (x[None],)).square().sum()

    def run(m, x):
        parameters = {name: p.detach() for name, p in m.named_parameters()}
        return clipped_sum(loss_of(m), parameters, x, max_norm=bound, chunk_size=3)

    own = {name: p.detach() for name, p in plain.named_parameters()}
    bound = float(gradient_norms(loss_of(plain), own, x).median())  # half of them are clipped
    total, norms = run(model, share([x])[0])
    for value in total.values():
        dist.all_reduce(value)
    expected, all_norms = run(plain, x)
    check([total], [expected])
    torch.testing.assert_close(norms, share([all_norms])[0])


class Reduced(torch.autograd.Function):
    """The sum over all ranks, written to its argument, as in Megatron's layers."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def scattered(x):
    """What rank 0 gives to this one, in a list of lists. It has no gradient."""
    parts = [part.contiguous() for part in x.detach().chunk(dist.get_world_size())]
    mine = torch.empty_like(parts[0])
    dist.scatter(mine, parts if dist.get_rank() == 0 else None)
    return x * mine.sum()


def in_scope(f):
    def run(x):
        with checkpoint_scope():
            return f(x)

    return run


@mock.patch.object(kernels, "begin")
def collectives(begin):
    """They write to tensors, though their schemas do not say so, and some return before they have.

    A recomputation that sees few operators may begin again in one process, and the others would wait for it.
    """
    group = dist.group.WORLD
    gathered = lambda x: functional.all_gather_tensor_autograd(x, 0, group)[:BATCH]
    wraps = (
        in_scope,
        partial(remat, policy=dots_saveable),
        partial(remat, policy=everything_saveable),
        lambda f: partial(checkpoint, f, context_fn=partial(contexts, dots_saveable)),
    )
    for reduce in (Reduced.apply, all_reduce, gathered, scattered):
        torch.manual_seed(dist.get_rank())
        w = torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
        x = torch.randn(BATCH, WIDTH, dtype=torch.float64)

        def run(wrap, w=w, x=x, reduce=reduce):
            y = x
            for _ in range(2):
                y = wrap(lambda y: torch.sin(reduce(torch.tanh(y @ w) @ w)))(y)
            return y.detach(), *torch.autograd.grad(y.square().sum(), w)

        expected = run(lambda f: f)
        for wrap in wraps:
            for _ in range(2):  # the second run knows what a policy keeps
                torch.testing.assert_close(run(wrap), expected)
    begin.assert_not_called()


def scope_around_what_fsdp_shards():
    """FSDP frees parameters that the scope still reads."""
    model, _, batches = setup("nothing")
    model.call = lambda block, x: in_scope(block)(x)
    called, share_of = fsdp(model)
    try:
        steps(called, share_of(batches))
    except MutationError as error:
        assert "is freed" in str(error), error
    else:
        raise AssertionError("no error")


CASES = {
    case.__name__: case
    for case in (
        training,
        fsdp_inside,
        fsdp1_inside,
        functional_call_of_distributed_tensors,
        per_sample,
        collectives,
        scope_around_what_fsdp_shards,
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        dist.barrier()
        print(f"rank {dist.get_rank()}: {name} passes", flush=True)
    # Not in a `finally`: it would wait for the other ranks, and hide the error of this one.
    dist.destroy_process_group()
    # In the end of Python, one process of some hundred aborted ("terminate called without an active exception"), when
    # all had passed. The cause is not known.
    os._exit(0)
