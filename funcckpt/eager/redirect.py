"""Whether torch's checkpoint is to be ours, in this thread and in what it computes again later.

Kept apart from `patched`, since a recomputation has to know it as well: the checkpoints inside of a
region have to be of the same make in the forward and in the recomputation, which may be long after the
block in which the forward ran, and in another thread.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .. import _torch

_lock = threading.Lock()
# How many blocks and recomputations, in all threads, need the redirection to be in place.
_users = 0
# Whether `install` has been called.
_installed = False
# What holds in this context, whatever is installed.
_here: ContextVar[bool | None] = ContextVar("funcckpt_patched", default=None)
# Ours; set by `patched`, which imports it.
_ours: Callable[..., Any] | None = None


def is_active() -> bool:
    """Whether a call of torch's checkpoint is a call of ours, here and now."""
    here = _here.get()
    return _installed if here is None else here


def _call(*args: Any, **kwargs: Any) -> Any:
    # Inside of one of torch's, which may have run its forward before the patch, all are torch's.
    within = _torch.is_torch_checkpoint(_torch.top_saved_tensors_hooks())
    if is_active() and _ours is not None and not within:
        if kwargs.get("use_reentrant") is None:
            warnings.warn(
                "torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly. Torch "
                "takes it to be True; funcckpt, which is called here, to be False.",
                stacklevel=3,  # beyond torch's wrapper
            )
        return _ours(*args, **kwargs)
    return _torch.original_checkpoint(*args, **kwargs)


def _count(change: int) -> None:
    global _users
    with _lock:
        before, _users = _users, _users + change
        if (before == 0) != (_users == 0):
            _torch.redirect_checkpoint(_call if _users else None)


@contextmanager
def active(value: bool) -> Iterator[None]:
    """Let torch's checkpoint be ours, or torch's, for the time of a block, in this thread."""
    if value:
        _count(1)
    token = _here.set(value)
    try:
        yield
    finally:
        _here.reset(token)
        if value:
            _count(-1)


def set_installed(value: bool) -> None:
    global _installed
    with _lock:
        changed, _installed = _installed != value, value
    if changed:
        _count(1 if value else -1)
