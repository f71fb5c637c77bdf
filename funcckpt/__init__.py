"""Activation checkpointing as a pure function transform for PyTorch and torch.func.

`remat(f)` and `checkpoint(f, ...)` keep the inputs of f and run it again in the backward. Their contract:

====================================================  ==================================================
What f refers to                                      In the recomputation
====================================================  ==================================================
tensors, numbers, functions and modules: arguments,   those of the call. A tensor that f uses is an input
closure variables, defaults, globals, partials,       of the checkpoint; one that f does not use is none
bound objects, attributes, items
parameters, buffers, attributes, ``training``         those of the call
random numbers of torch, Python and numpy             those of the call; the streams move once
buffers that a module updates in training             read as of the call, and updated once
autocast, default dtype and device                    those of the call
class attributes, Python modules, sets                right, or an error that names it
tensors that are written to in place                  MutationError
differentiated tensors that no search finds           inputs, or ClosureError
writes that no version counter records, names that    undefined
code computes, state inside of C objects
prints and other side effects                         happen twice
====================================================  ==================================================

``docs/contract.md`` has each line with the test that holds it, and what is undefined.
"""

import typing as _typing
import warnings as _warnings

# Not `nn` and `policies`: a star import must not replace torch.nn.
__all__ = ["remat"]

try:
    # All private names are needed below.
    from ._torch import autograd as _autograd, dynamo as _dynamo, wrappers as _wrappers  # noqa: F401
except ImportError as error:
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


def __dir__() -> list[str]:
    """The public names; all others are internal."""
    return sorted([*__all__, "meter", "nn", "per_sample", "policies", "torch_compat", "__version__"])


__version__ = "0.1.0"
