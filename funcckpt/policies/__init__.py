"""What a checkpoint keeps beside its inputs, and names for values.

A policy is a function ``policy(ctx, op, *args, **kwargs)``, or a list of operators. The function is called
for each operator of the forward, below autograd and all transforms, and returns a `CheckpointPolicy` or a
bool. It is passed to `remat(f, policy=...)`, or to `checkpoint` through
`create_selective_checkpoint_contexts`. Names and meanings here are those of ``jax.checkpoint_policies``.

A policy says what may be kept. Of that, `remat` keeps what the backward reads, or needs to compute what it
reads. Views, and results that are written to in place, are always recomputed.

>>> import torch
>>> from funcckpt import policies, remat
>>> def block(x, w):
...     return torch.tanh(x @ w).sum()
>>> x, w = torch.ones(2, 3), torch.ones(3, 4)
>>> torch.func.grad(remat(block, policy=policies.dots_saveable))(x, w).shape
torch.Size([2, 3])
"""

from .budget import budget
from .policies import (
    Policy,
    checkpoint_dots,
    checkpoint_dots_with_no_batch_dims,
    checkpoint_name,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_from_both_policies,
    save_only_these_names,
)

__all__ = ["Policy", "budget", "checkpoint_name", "everything_saveable", "nothing_saveable"]
__all__ += ["checkpoint_dots", "checkpoint_dots_with_no_batch_dims", "offload_dot_with_no_batch_dims"]
__all__ += ["dots_saveable", "dots_with_no_batch_dims_saveable", "save_and_offload_only_these_names"]
__all__ += ["save_any_names_but_these", "save_anything_except_these_names"]
__all__ += ["save_from_both_policies", "save_only_these_names"]
