"""What funcckpt raises.

Every message names the function, the argument or tensor with its shape and dtype, the transform
under which it happened, and the way out.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError


def describe(x: Tensor) -> str:
    """A tensor in words: dtype and shape."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class FuncckptError(RuntimeError):
    """Base of all errors that funcckpt raises itself."""


class CheckpointError(FuncckptError, _TorchCheckpointError):
    """A recomputation gave something else than the forward did."""


class ClosureError(FuncckptError):
    """f uses a differentiated, batched or dual tensor that it was not given and that was not found."""


class MutationError(FuncckptError):
    """Something that f was given or has captured was changed in place, inside of f or after it."""


class EscapeError(FuncckptError):
    """f stored a tensor outside of itself, where it would have lost its gradient."""


class InputError(FuncckptError, TypeError):
    """f, an argument or an option is of a kind that cannot be checkpointed."""


class OptionError(InputError, ValueError):
    """An option has a value that it cannot have, or that cannot be honoured where it is used."""


class OutputError(FuncckptError, TypeError):
    """f returned tensors inside of an object that is no pytree node."""


class TransformError(FuncckptError):
    """What was asked for, such as saved-tensor hooks, is refused by `torch.func` transforms."""
