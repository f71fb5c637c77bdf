"""The path of saved-tensor hooks, for plain eager code. Torch's own settings apply, and are found here."""

from torch.utils.checkpoint import (
    DefaultDeviceType as DefaultDeviceType,
    GraphExecGroup as GraphExecGroup,
    noop_context_fn as noop_context_fn,
    set_checkpoint_debug_enabled as set_checkpoint_debug_enabled,
    set_checkpoint_early_stop as set_checkpoint_early_stop,
)
