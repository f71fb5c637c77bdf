"""`checkpoint`: `torch.utils.checkpoint.checkpoint`, under every transform.

In plain eager code it works by saved-tensor hooks (`region`). Under a `torch.func` transform, where hooks are
not allowed, it works by `remat`. In plain forward mode it calls the function as it is. While a compiler or
`make_fx` traces plain eager code, it calls torch's own checkpoint, which they support.
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
from .._torch import autograd, dynamo, functorch, wrappers
from ..core.call import Options as RematOptions
from ..errors import OptionError
from ..policies.budget import Budget
from ..policies.policies import Policy, chooser_of, nothing_saveable
from ..remat import (
    AS_IT_IS,
    CHECKS,
    WITHOUT,
    Check,
    call as call_remat,
    check_determinism,
    decides,
    name_and_check,
)
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
    """Call a function, keep its inputs, and recompute the rest when the backward needs it.

    The signature is that of `torch.utils.checkpoint.checkpoint`. It works in plain eager code and under every
    `torch.func` transform. It returns what `function` returns, and raises what :func:`remat` raises; but in
    plain eager code `function` may return anything, and store tensors.

    Parameters
    ----------
    function : callable
        The function to call. Without it, a decorator is returned: ``checkpoint(**options)(f)``.
    *args, **kwargs
        Its arguments: pytrees of tensors of any shape and dtype, and of other values.
    use_reentrant : bool or None
        Accepted for compatibility. True is treated as False, with one warning.
    preserve_rng_state : bool
        Whether the recomputation draws the random numbers of the forward.
    context_fn : callable
        Returns two context managers, one for the forward and one for the recomputation; see
        :func:`create_selective_checkpoint_contexts`. Under a transform, only its policy is used.
    determinism_check : {"default", "none", "values"}
        "default" compares shapes, dtypes and devices of the forward and the recomputation, and finds tensors
        that were changed in place between the two. "none" compares nothing. "values" also compares the
        values of the outputs; the call then works by `remat`.
    debug : bool
        Whether errors about a recomputation by hooks list the operators of both runs.
    early_stop : bool
        Whether a recomputation by hooks stops as soon as it has all that is needed.
    respect_saved_tensors_hooks : bool or None
        Only False is supported: saved-tensor hooks around the call do not see what a policy saves.
    policy : callable, list of operators, or None
        What to keep beside the inputs, as for `remat`. The call then works by `remat`, also in plain eager
        code. That saves memory under a double backward, where hooks do not. For this effect alone, pass
        :func:`funcckpt.policies.nothing_saveable`, which keeps nothing.

    Notes
    -----
    Hooks are not allowed inside of a transform. So if f itself calls a transform, each call starts with hooks
    and then begins again by `remat`. Call `remat` directly to avoid the first start.

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
            "checkpoint: respect_saved_tensors_hooks=True is not supported. To move what a policy saves, use "
            "one that offloads (CheckpointPolicy.MUST_CPU_OFFLOAD)."
        )
    if use_reentrant and not torch.compiler.is_dynamo_compiling():
        _warn_of_reentrant()
    options = Options(preserve_rng_state, determinism_check, context_fn, debug, early_stop, policy)
    if function is None:
        if kwargs:
            raise OptionError(f"checkpoint, without a function, has no option {', '.join(kwargs)}.")
        # A module's __dict__ is its state, not an annotation.
        return lambda f: functools.update_wrapper(
            lambda *args, **kwargs: call(f, args, kwargs, options),
            f.forward if isinstance(f, nn.Module) else f,
            updated=(),
        )
    return call(function, args, kwargs, options)


@functools.cache
def _warn_of_reentrant() -> None:
    warnings.warn("funcckpt.checkpoint treats use_reentrant=True like use_reentrant=False.", stacklevel=3)


def check_options(title: str, options: Options) -> None:
    """Raise an OptionError if an option is invalid."""
    check_determinism(title, options.determinism_check)
    if not callable(options.context_fn):
        raise OptionError(f"{title}: context_fn must be a function, not {options.context_fn!r}.")
    if options.policy is not None and options.context_fn is not noop_context_fn:
        raise OptionError(f"{title} takes policy= or context_fn=, not both.")
    chooser_of(options.policy, title)


def call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """A call of :func:`checkpoint`."""
    if options.determinism_check not in CHECKS:
        check_options(title(f), options)
    theirs: Any = None  # torch's own checkpoint, where it makes the call
    if torch.compiler.is_dynamo_compiling():
        if options.policy is not None and options.policy is not nothing_saveable:
            compiled.refuse("checkpoint or Remat: policy")
        is_functional = options.policy is not None or options.determinism_check == "values"
        if is_functional or options.context_fn is noop_context_fn:
            # Torch's own recomputes nothing under a transform, and where Dynamo does not trace f, it promises
            # less. (Dynamo cannot read the name of every f.)
            return compiled.call(functools.partial(call, options=options), "f", f, args, kwargs)
        if compiled.differentiates():
            compiled.refuse("checkpoint: under torch.func transforms, context_fn")
        theirs = torch_checkpoint.checkpoint
    elif options.policy is not None or options.determinism_check == "values":
        return _functional(f, args, kwargs, options)
    elif functorch.maybe_current_level() is None and dynamo.is_traced() and not wrappers.in_dual_level():
        theirs = autograd.original_checkpoint
    if theirs is not None:
        if dynamo.is_exporting():  # torch's own, in another one, would trace changes of the grad mode
            return f(*args, **kwargs)
        how = dict(zip(Options._fields[:3], options[:3], strict=True))
        return theirs(functools.partial(f, **kwargs) if kwargs else f, *args, use_reentrant=False, **how)
    is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if not torch.is_grad_enabled() or is_tracing or wrappers.in_dual_level():
        return f(*args, **kwargs)
    at_level = functorch.maybe_current_level() is not None
    if at_level and autograd.graph_task() != -1:
        # Torch's checkpoint runs f again inside of a batched backward. By hooks, as f ran before.
        at_level = not autograd.is_torch_checkpoint(autograd.top_saved_tensors_hooks())
    if at_level:
        return _functional(f, args, kwargs, options)
    if (decide := decides.get()) is not None:
        policy = decide(f, title(f))
        if policy is WITHOUT:
            return f(*args, **kwargs)
        if isinstance(policy, Budget):  # which has no contexts
            return _functional(f, args, kwargs, options._replace(policy=policy))
        if policy is not AS_IT_IS:
            context_fn = functools.partial(create_selective_checkpoint_contexts, policy or [])
            options = options._replace(context_fn=context_fn)
    region = Region(f, args, kwargs, options)
    if region.is_lazy:
        return f(*args, **kwargs)
    try:
        return region.run(f, args, kwargs)
    except RuntimeError as error:
        # If the caller has saved-tensor hooks, the transform refuses those, too.
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
                f"{title}: under torch.func transforms, context_fn must be made with "
                "funcckpt.create_selective_checkpoint_contexts. Enter other contexts inside of the function."
            )
        policy = forward.policy
    how = RematOptions(*options[:2], chooser_of(policy, title))
    f = functools.partial(patched.run, f) if patched.is_active() else f
    return call_remat(f, name, how, args, kwargs)
