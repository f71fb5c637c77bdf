"""`patched`, `install` and `uninstall`: models whose checkpoint calls are not ours to change.

Libraries hold torch's checkpoint in many ways: as `torch.utils.checkpoint.checkpoint`, as a name that
they imported from there, in a `functools.partial` on each module (transformers), inside of a function of
their own (timm). Replacing names would miss some of these and leave behind what was imported meanwhile. So
the function stays what and where it is, and one thing is touched: torch's checkpoint is a small wrapper
around the function that does the work, which it looks up in the attribute `__dynamo_disable` of the
original function. From the first patch on, that attribute is a function that asks whether a patch holds
in the thread that is calling, and calls ours or torch's. Dynamo, which knows checkpoint by itself and does
not run it, sees no difference.

A recomputation has to know it as well: the checkpoints inside of a region have to be of the same make in
the forward and in the recomputation, which may be long after the block, and in another thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from .. import _torch

# Whether `install` has been called.
_installed = False
# What holds in this context, whatever is installed.
_here: ContextVar[bool | None] = ContextVar("funcckpt_patched", default=None)
# Our checkpoint.
_ours: Callable[..., Any]


def patched() -> AbstractContextManager[None]:
    """Let every call of `torch.utils.checkpoint.checkpoint` be one of ours, for the time of a block.

    All references to the function are meant, whoever holds them and since when: names imported from
    torch, attributes, partials; and so is `torch.utils.checkpoint.checkpoint_sequential`, which calls it.
    It holds in the thread that runs the block, and in the recomputation of what was checkpointed in it,
    also after the block and in another thread. Blocks may be nested and run in several threads.

    Calls with `use_reentrant=True` are served like the others.

    Returns
    -------
    context manager

    See Also
    --------
    install : the same for the whole process.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint       # a library's
    >>> from funcckpt import patched
    >>> def layer(x):
    ...     return checkpoint(torch.sin, x, use_reentrant=False)
    >>> with patched():
    ...     torch.func.vmap(torch.func.grad(layer))(torch.zeros(2))
    tensor([1., 1.])
    """
    return active(True)


def install() -> None:
    """Let every call of `torch.utils.checkpoint.checkpoint` be one of ours, in all threads.

    Like :func:`patched`, until :func:`uninstall` is called. To call it twice is to call it once.
    """
    global _installed
    _torch.redirect_checkpoint(_call)
    _installed = True


def uninstall() -> None:
    """Undo :func:`install`. Blocks of :func:`patched` that are running go on."""
    global _installed
    _installed = False


def is_active() -> bool:
    """Whether a call of torch's checkpoint is a call of ours, here and now."""
    here = _here.get()
    return _installed if here is None else here


@contextmanager
def active(value: bool) -> Iterator[None]:
    """Let torch's checkpoint be ours, or torch's, for the time of a block, in this thread."""
    if value:
        _torch.redirect_checkpoint(_call)
    token = _here.set(value)
    try:
        yield
    finally:
        _here.reset(token)


def serve(checkpoint: Callable[..., Any]) -> None:
    """Call this one. (It is defined in a module that imports this.)"""
    global _ours
    _ours = checkpoint


def _call(*args: Any, **kwargs: Any) -> Any:
    # Inside of one of torch's, which may have run its forward before the patch, all are torch's.
    if not is_active() or _torch.is_torch_checkpoint(_torch.top_saved_tensors_hooks()):
        return _torch.original_checkpoint(*args, **kwargs)
    if kwargs.get("use_reentrant") is None:
        warnings.warn(
            "torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly. Torch "
            "takes it to be True; funcckpt, which is called here, to be False.",
            stacklevel=3,  # beyond torch's wrapper
        )
    return _ours(*args, **kwargs)
