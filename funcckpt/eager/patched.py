"""`patched`, `install` and `uninstall`: for models whose calls of torch's checkpoint cannot be edited.

Libraries refer to torch's checkpoint under many names. So only one attribute of the function is replaced,
`__dynamo_disable`, through which it finds the code to run. From the first patch on, that code asks whether a
patch is active in the calling thread. A region that contains checkpoints must meet the same kind of them in
its recomputation, which may run long after the block, and in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from .._torch import autograd
from ..errors import TransformError

_installed = False
# Whether a patch is active in this context; None: as installed.
_here: ContextVar[bool | None] = ContextVar("funcckpt_patched", default=None)


def patched() -> AbstractContextManager[None]:
    """Redirect calls of `torch.utils.checkpoint.checkpoint` to :func:`checkpoint`, in a ``with`` block.

    It applies to the thread that runs the block, however the function was imported. It also applies to the
    recomputation of what was checkpointed in the block, even after the block and in another thread.
    :func:`install` does the same for the whole process.

    A TransformError is raised if the model calls `requires_grad_()`, which transforms do not allow.

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
    """Redirect calls of `torch.utils.checkpoint.checkpoint` to :func:`checkpoint`, in all threads.

    Like :func:`patched`, until :func:`uninstall` is called.
    """
    global _installed
    autograd.redirect_checkpoint(_call)
    _installed = True


def uninstall() -> None:
    """Undo :func:`install`. A block of :func:`patched` that is running is not affected."""
    global _installed
    _installed = False


def is_active() -> bool:
    """Whether a call of torch's checkpoint here and now goes to ours."""
    here = _here.get()
    return _installed if here is None else here


@contextmanager
def active(value: bool) -> Iterator[None]:
    """Redirect torch's checkpoint to ours, or not, for a block of code in this thread."""
    if value:
        autograd.redirect_checkpoint(_call)
    before = _here.get()
    _here.set(value)
    try:
        yield
    except RuntimeError as error:
        if "call Tensor.requires_grad_()" not in str(error):
            raise
        raise TransformError(
            "patched: the model calls requires_grad_(), which no transform allows. In transformers, a hook "
            "on embeddings does that: call model.disable_input_require_grads() after checkpointing is "
            'enabled, or call funcckpt.nn.apply_remat(model, "GradientCheckpointingLayer") instead.'
        ) from error
    finally:
        _here.set(before)  # a generator may be left in another context than it was entered in


def run(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of f in which torch's checkpoints are redirected to ours."""
    with active(True):
        return f(*args, **kwargs)


def _call(*args: Any, **kwargs: Any) -> Any:
    from .checkpoint import checkpoint  # which imports this module

    # Inside of a checkpoint of torch, whose forward may have run before the patch, all are torch's.
    is_ours = is_active() and not autograd.is_torch_checkpoint(autograd.top_saved_tensors_hooks())
    return (checkpoint if is_ours else autograd.original_checkpoint)(*args, **kwargs)
