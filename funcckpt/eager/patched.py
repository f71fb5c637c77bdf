"""`patched`, `install` and `uninstall`: models whose checkpoint calls are not ours to change.

Libraries hold torch's checkpoint in many ways: as `torch.utils.checkpoint.checkpoint`, as a name that
they imported from there, in a `functools.partial` on each module (transformers), inside of a function of
their own (timm). Replacing names would miss some of these and leave behind what was imported meanwhile. So
the function stays what and where it is, and one thing is touched: torch's checkpoint is a small wrapper
around the function that does the work, which it looks up in the attribute `__dynamo_disable` of the
original function. While a patch is active, that attribute is a function that asks whether the patch holds
in the thread that is calling, and calls ours or torch's. With the last patch it is put back. Dynamo, which
knows checkpoint by itself and does not run it, sees no difference.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from . import redirect
from .checkpoint import checkpoint

redirect._ours = checkpoint


def patched() -> AbstractContextManager[None]:
    """Let every call of `torch.utils.checkpoint.checkpoint` be one of ours, for the time of a block.

    All references to the function are meant, whoever holds them and since when: names imported from
    torch, attributes, partials; and so is `torch.utils.checkpoint.checkpoint_sequential`, which calls it.
    It holds in the thread that runs the block, and in the recomputation of what was checkpointed in it,
    also after the block and in another thread. Blocks may be nested and run in several threads.

    Calls with `use_reentrant=True` are served without re-entrant autograd, and raise where that would
    change the result (:func:`checkpoint`).

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
    return redirect.active(True)


def install() -> None:
    """Let every call of `torch.utils.checkpoint.checkpoint` be one of ours, in all threads.

    Like :func:`patched`, until :func:`uninstall` is called. To call it twice is to call it once.
    """
    redirect.set_installed(True)


def uninstall() -> None:
    """Undo :func:`install`. Blocks of :func:`patched` that are running go on."""
    redirect.set_installed(False)
