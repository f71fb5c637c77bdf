"""`patched`, `install` and `uninstall`: models whose checkpoint calls are not ours to change.

Libraries hold torch's checkpoint in many ways. So one thing is touched: the attribute `__dynamo_disable` of
the function, in which it looks up what does the work. From the first patch on, that is a function that asks
whether a patch holds in the thread that is calling. The checkpoints inside of a region have to be of the same
make in the recomputation, which may be long after the block, and in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from .._torch import autograd
from ..errors import TransformError

_installed = False
# What holds in this context, whatever is installed.
_here: ContextVar[bool | None] = ContextVar("funcckpt_patched", default=None)


def patched() -> AbstractContextManager[None]:
    """Let every call of `torch.utils.checkpoint.checkpoint` be one of ours, for the time of a block.

    It holds in the thread that runs the block, whoever holds the function, and in the recomputation of what
    was checkpointed in it, also after the block and in another thread. :func:`install` does the same for the
    whole process.

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

    Like :func:`patched`, until :func:`uninstall` is called.
    """
    global _installed
    autograd.redirect_checkpoint(_call)
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
        autograd.redirect_checkpoint(_call)
    token = _here.set(value)
    try:
        yield
    except RuntimeError as error:
        if "call Tensor.requires_grad_()" not in str(error):
            raise
        raise TransformError(
            "patched: requires_grad_() is called, which no transform allows: by the hook that the switch of "
            "transformers puts on embeddings. Call model.disable_input_require_grads() after the switch; or "
            'write funcckpt.nn.apply_remat(model, "GradientCheckpointingLayer") in its place.'
        ) from error
    finally:
        _here.reset(token)


def always(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, with the checkpoints inside of it ours, whenever it is run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with active(True):
            return f(*args, **kwargs)

    return run


def _call(*args: Any, **kwargs: Any) -> Any:
    from .checkpoint import checkpoint  # which imports this module

    # Inside of one of torch's, which may have run its forward before the patch, all are torch's.
    is_ours = is_active() and not autograd.is_torch_checkpoint(autograd.top_saved_tensors_hooks())
    return (checkpoint if is_ours else autograd.original_checkpoint)(*args, **kwargs)
