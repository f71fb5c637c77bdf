"""Names for values, of which policies and reports can speak."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _torch
from ..errors import InputError, describe

T = TypeVar("T")


def checkpoint_name(x: T, name: str) -> T:
    """Label a value, so that policies and reports can speak of it. The identity for everyone else.

    The counterpart of `jax.ad_checkpoint.checkpoint_name`. It costs nothing where no policy looks.

    Parameters
    ----------
    x : pytree of tensors
        What to label, of any shapes. Under `torch.func.vmap` the batched value is labelled; in forward mode
        the primal, and not its tangent.
    name : str
        The label. Several values may have the same one.

    Returns
    -------
    pytree of tensors
        x, of the same shapes.

    Raises
    ------
    InputError
        The name is no string.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import checkpoint_name
    >>> def block(x, w):
    ...     return torch.tanh(checkpoint_name(x @ w, "projected"))
    >>> block(torch.zeros(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    if not isinstance(name, str):
        what = describe(name) if isinstance(name, Tensor) else repr(name)
        raise InputError(f"checkpoint_name takes a value and then its name, a string, not {what}.")
    if torch.compiler.is_compiling() or not _is_looked_at():
        return x
    with _named(name):
        named: T = pytree.tree_map_only(Tensor, torch.ops.aten.alias.default, x)
    return named


class _Current(threading.local):
    name: str | None = None


_current = _Current()


@contextmanager
def _named(name: str) -> Iterator[None]:
    before, _current.name = _current.name, name
    try:
        yield
    finally:
        _current.name = before


def current_name() -> str | None:
    """The name that is being given, asked by a dispatch mode as it is handed an operator.

    A name arrives as `aten.alias` of the labelled tensor, below autograd and all transforms, in modes that
    have an attribute `sees_names = True`: only while one of them is active is there such an operator.
    """
    return _current.name


def _is_looked_at() -> bool:
    return any(getattr(mode, "sees_names", False) for mode in _torch.dispatch_modes())
