"""Activation checkpointing as a pure function transform for PyTorch and torch.func.

`remat(f)` and `checkpoint(f, ...)` keep the inputs of f and run it again in the backward. That run finds
all that f refers to as it was at the call: tensors, numbers and modules in arguments, closures and globals,
random streams, buffers, autocast. Where that is not possible, an error names it, or ``docs/contract.md``
names it as undefined. That page is the complete contract, with the test that holds each line. Side effects
happen twice.
"""

import importlib as _importlib
import typing as _typing
import warnings as _warnings

# Not `nn` and `policies`: a star import must not replace torch.nn.
__all__ = ["remat"]

try:
    # All private names are needed below.
    from ._torch import autograd as _autograd, dynamo as _dynamo, wrappers as _wrappers  # noqa: F401
except (ImportError, AttributeError) as error:
    from torch import __version__ as _version

    _warnings.warn(
        f"funcckpt does not know torch {_version}: {error}. Install a newer funcckpt, or torch 2.11 to 2.15. "
        "Until then only remat is there, as a plain torch.autograd.Function, which is slower.",
        stacklevel=2,
    )
    if not _typing.TYPE_CHECKING:
        from .core.primitive import remat
else:
    from . import nn as nn, policies as policies
    from .eager.checkpoint import checkpoint
    from .eager.patched import install, patched, uninstall
    from .eager.scope import checkpoint_scope
    from .eager.selective import (
        CheckpointPolicy,
        SelectiveCheckpointContext,
        create_selective_checkpoint_contexts,
    )
    from .eager.sequential import checkpoint_sequential, plan_segments
    from .errors import (
        CheckpointError,
        ClosureError,
        EscapeError,
        FuncckptError,
        InputError,
        MutationError,
        OptionError,
        OutputError,
        TransformError,
    )
    from .inspect.explain import explain
    from .inspect.plot import plot_memory, plot_tradeoff
    from .inspect.residuals import print_saved_residuals, saved_residuals
    from .loops import fori_loop, inner_grad, scan, while_loop
    from .policies import checkpoint_name
    from .remat import remat

    __all__ += ["checkpoint", "checkpoint_name", "checkpoint_scope", "checkpoint_sequential", "plan_segments"]
    __all__ += ["CheckpointPolicy", "SelectiveCheckpointContext", "create_selective_checkpoint_contexts"]
    __all__ += ["fori_loop", "inner_grad", "install", "patched", "scan", "uninstall", "while_loop"]
    __all__ += ["explain", "plot_memory", "plot_tradeoff", "print_saved_residuals", "saved_residuals"]
    __all__ += ["CheckpointError", "ClosureError", "EscapeError", "FuncckptError", "InputError"]
    __all__ += ["MutationError", "OptionError", "OutputError", "TransformError"]


def __getattr__(name: str) -> _typing.Any:
    if name in ("per_sample", "torch_compat"):  # imported only when asked for
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names; all others are internal."""
    return sorted([*__all__, "meter", "nn", "per_sample", "policies", "torch_compat", "__version__"])


__version__ = "0.1.0"
