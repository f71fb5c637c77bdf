"""The path of saved-tensor hooks, for plain eager code: what `torch.utils.checkpoint` offers, and more.

It goes to `funcckpt.remat` wherever hooks cannot be; the functional path never imports it. Torch's own
settings apply to ours as well, and are found here too.
"""

from torch.utils.checkpoint import DefaultDeviceType as DefaultDeviceType
from torch.utils.checkpoint import GraphExecGroup as GraphExecGroup
from torch.utils.checkpoint import noop_context_fn as noop_context_fn
from torch.utils.checkpoint import set_checkpoint_debug_enabled as set_checkpoint_debug_enabled
from torch.utils.checkpoint import set_checkpoint_early_stop as set_checkpoint_early_stop
