"""All names of `torch.utils.checkpoint`: write ``import funcckpt.torch_compat as cp`` in its place.

The functions are those of funcckpt. Torch's own are its settings, its types and `CheckpointFunction`.
"""

from torch.utils.checkpoint import *  # noqa: F403
from torch.utils.checkpoint import __all__ as __all__

from .eager.checkpoint import checkpoint as checkpoint
from .eager.selective import create_selective_checkpoint_contexts as create_selective_checkpoint_contexts
from .eager.sequential import checkpoint_sequential as checkpoint_sequential
