"""What funcckpt raises.

A message names the function, the argument or tensor with its shape and dtype, the transform under which it
happened, as far as they are known, and the way out.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError


def describe(x: Tensor) -> str:
    """A tensor in words: dtype and shape."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def check_positive(
    title: str, of: Any = Integral, /, *, or_none: bool = False, or_zero: bool = False, **options: Any
) -> None:
    """Raise an OptionError if an option is not a positive number of a kind."""
    for option, value in options.items():
        if value is None and or_none:
            continue
        is_number = isinstance(value, of) and not isinstance(value, bool)
        if not is_number or not (value > 0 or (or_zero and value == 0)):
            kind = "integer" if of is Integral else "number"
            raise OptionError(f"{title}: {option}={value!r} is not a positive {kind}.")


class FuncckptError(RuntimeError):
    """Base of all errors that funcckpt raises itself."""


class CheckpointError(FuncckptError, _TorchCheckpointError):
    """A recomputation differs from the forward, or is not possible."""


class ClosureError(FuncckptError):
    """f uses a differentiated, batched or dual tensor that is not an argument and was not found."""


class MutationError(FuncckptError):
    """An argument or a captured tensor was changed in place: by f, or before the backward."""


class EscapeError(FuncckptError):
    """f stored a tensor outside of itself, where its gradient would be lost."""


class InputError(FuncckptError, TypeError):
    """f, an argument or an option has a type that is not supported."""


class OptionError(InputError, ValueError):
    """An option has an invalid value, or one that is not supported where it is used."""


class OutputError(FuncckptError, TypeError):
    """f returned tensors inside of an object that is not a pytree node."""


class TransformError(FuncckptError):
    """A `torch.func` transform does not allow what was asked for, such as saved-tensor hooks."""
