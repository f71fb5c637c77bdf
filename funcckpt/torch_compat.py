"""`torch.utils.checkpoint` by its own names: ``import funcckpt.torch_compat as cp`` in place of that module.

What funcckpt has is funcckpt's; settings, types and what serves `use_reentrant=True` are torch's.
"""

from torch.utils.checkpoint import *  # noqa: F403
from torch.utils.checkpoint import __all__ as __all__

from .eager.checkpoint import checkpoint as checkpoint
from .eager.selective import create_selective_checkpoint_contexts as create_selective_checkpoint_contexts
from .eager.sequential import checkpoint_sequential as checkpoint_sequential
