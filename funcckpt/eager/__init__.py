"""The path of saved-tensor hooks, for plain eager code. Torch's own settings apply, and are found here."""

from torch.utils.checkpoint import DefaultDeviceType as DefaultDeviceType
from torch.utils.checkpoint import GraphExecGroup as GraphExecGroup
from torch.utils.checkpoint import noop_context_fn as noop_context_fn
from torch.utils.checkpoint import set_checkpoint_debug_enabled as set_checkpoint_debug_enabled
from torch.utils.checkpoint import set_checkpoint_early_stop as set_checkpoint_early_stop
