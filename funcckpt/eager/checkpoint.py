"""`checkpoint`: the call of `torch.utils.checkpoint.checkpoint`, wherever it stands.

In plain eager code the work is done by saved-tensor hooks (`region`). Where those cannot be, under a
`torch.func` transform and in forward mode, it is done by `remat`; and while a compiler or `make_fx` traces
plain eager code, by torch's own checkpoint, which they know.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from .. import compiled
from .._torch import autograd, functorch, wrappers
from ..core.call import Options as RematOptions
from ..errors import OptionError
from ..policies.policies import Policy, chooser_of, nothing_saveable
from ..remat import AS_IT_IS, CHECKS, PLAIN, Check, call as call_remat, decides, name_and_check
from . import patched
from .region import Contexts, Options, Region, title
from .selective import Forward, create_selective_checkpoint_contexts

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpoint(function: Callable[..., R], *args: Any, **kwargs: Any) -> R: ...


@overload
def checkpoint(function: None = None, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    function: Any = None,
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: Check = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: Policy | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function, keep its inputs, and compute the rest again when the backward needs it.

    The signature is that of `torch.utils.checkpoint.checkpoint`; it may stand in plain eager code and under
    any `torch.func` transform.

    Parameters
    ----------
    function : callable
        What to call. Without it, a decorator is returned: ``checkpoint(**options)(f)``.
    *args, **kwargs
        What to call it with; tensors of any shape, anything else, and any nesting of them.
    use_reentrant : bool or None
        Accepted, and False. True gives one warning.
    preserve_rng_state : bool
        Draw in the recomputation the random numbers of the forward.
    context_fn : callable
        Gives two context managers, for the forward and for the recomputation; see
        :func:`create_selective_checkpoint_contexts`. Under transforms its policy is `remat`'s.
    determinism_check : {"default", "none", "values"}
        Compare shapes, dtypes and devices of the recomputation with those of the forward, and look
        for tensors that were changed in place between the two; or not. "values" compares the outputs, as
        `remat` does, and works by it.
    debug : bool
        Errors about a recomputation by hooks list the operators of both runs.
    early_stop : bool
        Stop the recomputation by hooks when all that is needed is there.
    respect_saved_tensors_hooks : bool or None
        Accepted, and False: what a selective checkpoint saves does not go through hooks around the call.
    policy : callable, list of operators, or None
        What to keep beside the inputs, as `remat` takes it. The call then works by `remat` in plain eager
        code, too. Under a double backward that saves memory, where hooks do not; to have it and keep nothing,
        pass :func:`funcckpt.policies.nothing_saveable`.

    Notes
    -----
    Where f uses a transform, which refuses hooks, it is started anew in each call, and goes by `remat`. Call
    `remat` yourself to spare that.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import checkpoint
    >>> x = torch.zeros(3, requires_grad=True)
    >>> checkpoint(torch.sin, x).sum().backward()
    >>> x.grad
    tensor([1., 1., 1.])
    >>> torch.func.vmap(torch.func.grad(lambda x: checkpoint(torch.sin, x)))(torch.zeros(3))
    tensor([1., 1., 1.])
    >>> @checkpoint(preserve_rng_state=False)
    ... def f(x, debug):
    ...     return x * debug
    >>> f(torch.ones(2), debug=3)
    tensor([3., 3.])
    """
    if respect_saved_tensors_hooks:
        raise OptionError(
            "checkpoint: respect_saved_tensors_hooks=True is not supported. A policy that offloads "
            "(CheckpointPolicy.MUST_CPU_OFFLOAD) moves what a selective checkpoint saves."
        )
    if use_reentrant and not torch.compiler.is_compiling():
        _warn_of_reentrant()
    options = Options(preserve_rng_state, context_fn, determinism_check, debug, early_stop, policy)
    if function is None:
        if kwargs:
            raise OptionError(f"checkpoint: no option {', '.join(kwargs)}, or no function to call.")
        # A module's __dict__ is its state, not an annotation.
        return lambda f: functools.update_wrapper(
            lambda *args, **kwargs: call(f, args, kwargs, options),
            f.forward if isinstance(f, nn.Module) else f,
            updated=(),
        )
    return call(function, args, kwargs, options)


@functools.cache
def _warn_of_reentrant() -> None:
    warnings.warn("funcckpt.checkpoint serves use_reentrant=True like use_reentrant=False.", stacklevel=3)


def check_options(title: str, options: Options) -> None:
    """Raise what is wrong with options, before any call."""
    if options.determinism_check not in CHECKS:
        raise OptionError(f"{title}: determinism_check should be one of default, none and values.")
    if not callable(options.context_fn):
        raise OptionError(f"{title}: context_fn is called, and {options.context_fn!r} is no function.")
    if options.policy is not None and options.context_fn is not noop_context_fn:
        raise OptionError(f"{title} takes policy= or context_fn=, not both.")
    chooser_of(options.policy, title)


def call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """A call of :func:`checkpoint`."""
    if options.determinism_check not in CHECKS:
        check_options(title(f), options)
    if options.policy is not None or options.determinism_check == "values":
        if not torch.compiler.is_dynamo_compiling():
            return _functional(f, args, kwargs, options)
        if options.policy is not None and options.policy is not nothing_saveable:
            compiled.refuse("checkpoint: policy")
        return call_remat(f, "f", _of_remat(options), args, kwargs)
    if torch.compiler.is_compiling() or (functorch.maybe_current_level() is None and functorch.is_tracing()):
        # Dynamo takes no option that it cannot read, not even at its default.
        dynamo = torch.compiler.is_dynamo_compiling()
        if dynamo and compiled.differentiates():  # which torch's does without recomputation, or refuses
            if options.context_fn is not noop_context_fn:
                compiled.refuse("checkpoint: under torch.func transforms, context_fn")
            # (Dynamo cannot ask each f for its name.)
            return call_remat(f, "f", _of_remat(options), args, kwargs)
        contexts = {} if options.context_fn is noop_context_fn else {"context_fn": options.context_fn}
        return (torch_checkpoint.checkpoint if dynamo else autograd.original_checkpoint)(
            functools.partial(f, **kwargs) if kwargs else f,
            *args,
            use_reentrant=False,
            preserve_rng_state=options.preserve_rng_state,
            determinism_check=options.determinism_check,
            **contexts,  # type: ignore[arg-type]
        )
    if not torch.is_grad_enabled():
        return f(*args, **kwargs)
    _, enabled = autograd.checkpoint_settings()
    if enabled is not None:
        options = options._replace(debug=enabled)
    if functorch.maybe_current_level() is not None or wrappers.in_dual_level():
        return _functional(f, args, kwargs, options)
    if (decide := decides.get()) is not None:
        policy = decide(f, title(f))
        if policy is PLAIN:
            return f(*args, **kwargs)
        if policy is not AS_IT_IS:
            context_fn = functools.partial(create_selective_checkpoint_contexts, policy or [])
            options = options._replace(context_fn=context_fn)
    region = Region(f, args, kwargs, options)
    if region.is_lazy:
        return f(*args, **kwargs)
    try:
        return autograd.without_dynamo(region.run)(f, args, kwargs)
    except RuntimeError as error:
        # With hooks of the caller active, the functional path would be refused as well.
        if autograd.REFUSES_HOOKS not in str(error) or autograd.top_saved_tensors_hooks() is not None:
            raise
        region.undo()
    return _functional(f, args, kwargs, options)


def _functional(f: Callable[..., Any], args: Any, kwargs: Any, options: Options) -> Any:
    name, policy = name_and_check(f, "checkpoint"), options.policy
    title = f"checkpoint({name})"
    if options.context_fn is not noop_context_fn:
        check_options(title, options)
        forward, _ = options.context_fn()
        if not isinstance(forward, Forward):
            raise OptionError(
                f"{title}: under torch.func transforms and in forward mode, context_fn is made "
                "with funcckpt.create_selective_checkpoint_contexts. Enter others inside of the function."
            )
        policy = forward.policy
    how = _of_remat(options)._replace(chooser=chooser_of(policy, title))
    f = patched.always(f) if patched.is_active() else f
    return call_remat(f, name, how, args, kwargs)


def _of_remat(options: Options) -> RematOptions:
    return RematOptions(options.preserve_rng_state, options.determinism_check)
