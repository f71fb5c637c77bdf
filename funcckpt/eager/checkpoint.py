"""`checkpoint`: the call of `torch.utils.checkpoint.checkpoint`, wherever it stands.

In plain eager code the work is done by saved-tensor hooks (`region`). Under a `torch.func` transform,
in plain forward mode, and where f itself uses a transform that refuses such hooks, it is done by
`remat`. While a compiler or `make_fx` traces plain eager code, it is done by torch's own checkpoint,
which they know.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import FunctionType, MethodType
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

from .. import _torch, compiled
from ..errors import InputError, OptionError, describe
from ..remat import call_compiled, instead, remat
from . import patched
from .region import Contexts, Region, is_of_checkpoint, title
from .selective import Forward, Recompute, create_selective_checkpoint_contexts

P = ParamSpec("P")
R = TypeVar("R")

_CHECKS = ("default", "none")


class Options(NamedTuple):
    """Those of :func:`checkpoint`, which says what they mean."""

    use_reentrant: bool | None = False
    preserve_rng_state: bool = True
    context_fn: Callable[[], Contexts] = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None


@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = ...,
    preserve_rng_state: bool = ...,
    context_fn: Callable[[], Contexts] = ...,
    determinism_check: str = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    respect_saved_tensors_hooks: bool | None = ...,
    **kwargs: Any,
) -> R: ...


@overload
def checkpoint(
    function: None = None,
    *,
    use_reentrant: bool | None = ...,
    preserve_rng_state: bool = ...,
    context_fn: Callable[[], Contexts] = ...,
    determinism_check: str = ...,
    debug: bool = ...,
    early_stop: bool = ...,
    respect_saved_tensors_hooks: bool | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    function: Any = None,
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function, keep its inputs, and compute the rest again when the backward needs it.

    The signature is that of `torch.utils.checkpoint.checkpoint`, and so are results and options, in
    plain eager code and under any `torch.func` transform.

    Parameters
    ----------
    function : callable
        What to call. Without it, a decorator of functions and methods is returned:
        ``checkpoint(**options)(f)``. A function alone that cannot be called without arguments is
        decorated as well: ``@checkpoint``.
    *args, **kwargs
        What to call it with; tensors of any shape, anything else, and any nesting of them.
    use_reentrant : bool or None
        False and None are the same. True, the variant that torch gives up, is served like False, with one
        warning.
    preserve_rng_state : bool
        Draw in the recomputation the random numbers of the forward.
    context_fn : callable
        Gives two context managers, for the forward and for the recomputation; see
        :func:`create_selective_checkpoint_contexts`. Under transforms its policy is `remat`'s.
    determinism_check : {"default", "none"}
        Compare shapes, dtypes and devices of the recomputation with those of the forward, and look
        for tensors that were changed in place between the two; or not.
    debug : bool
        Errors about the recomputation list the operators of both runs; on the functional path, which
        compares results, it has no effect.
    early_stop : bool
        Stop the recomputation when all that is needed is there. The functional path skips what is
        not needed in any case.
    respect_saved_tensors_hooks : bool or None
        Whether what a selective checkpoint saves goes through the hooks (`save_on_cpu`, for one) that
        are active around the call. None is False.

    Returns
    -------
    Any
        What the function returned; or a decorator.

    Raises
    ------
    OptionError
        An option has a value that it cannot have, or that cannot be honoured here.
    MutationError
        A tensor that the function uses was changed in place before the recomputation.
    torch.utils.checkpoint.CheckpointError
        The recomputation saved other tensors than the forward. `funcckpt.CheckpointError` is one.

    Notes
    -----
    When f uses a transform that refuses hooks, that shows when f is run: it is then started anew, with
    the random streams put back, and goes by `remat` from then on if it is a module or a function. What it
    has changed by then is put back if it was found (`MutationError` if it cannot be).

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
    options = Options(
        use_reentrant,
        preserve_rng_state,
        context_fn,
        determinism_check,
        debug,
        early_stop,
        respect_saved_tensors_hooks,
    )
    if function is None:
        if args or kwargs:
            raise OptionError(
                f"checkpoint: {', '.join(kwargs) or 'arguments'} without a function to call. Write "
                "checkpoint(f, *args, **kwargs), or checkpoint(**options)(f)(*args, **kwargs)."
            )
        return lambda f: _decorated(f, options)
    if not args and not kwargs and not _can_be_called(function):
        return _decorated(function, options)
    return call(function, args, kwargs, options)


def _decorated(f: Callable[..., Any], options: Options) -> Callable[..., Any]:
    if not callable(f):
        raise InputError(f"checkpoint(**options) decorates a callable, not {type(f).__name__}.")

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return call(f, args, kwargs, options)

    # A module's __dict__ is its state, not an annotation.
    if isinstance(f, nn.Module):
        return functools.update_wrapper(checkpointed, f.forward, updated=())
    return functools.update_wrapper(checkpointed, f)


def _can_be_called(f: Any) -> bool:
    """Whether f takes no arguments, as far as its signature tells."""
    try:
        inspect.signature(f.forward if isinstance(f, nn.Module) else f).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin
        pass
    return True


@functools.cache
def _warn_of_reentrant() -> None:
    warnings.warn("funcckpt.checkpoint serves use_reentrant=True like use_reentrant=False.", stacklevel=4)


def call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    """A call of :func:`checkpoint`."""
    if options.determinism_check not in _CHECKS:
        raise OptionError(
            f"{title(f)}: determinism_check should be one of {list(_CHECKS)}, but got "
            f"{options.determinism_check!r}."
        )
    if options.use_reentrant and not torch.compiler.is_compiling():
        _warn_of_reentrant()
    if torch.compiler.is_compiling() or _torch.is_tracing_plain():
        # Dynamo knows the function, and AOTAutograd what it does. Dynamo takes no option that it cannot
        # read, not even at its default.
        dynamo = torch.compiler.is_dynamo_compiling()
        if dynamo and compiled.differentiates():  # which torch's does without recomputation, or refuses
            name = getattr(f, "__name__", None) or type(f).__name__
            return call_under_compiled_transform(f, name, args, kwargs, options)
        given: dict[str, Any] = {}
        if options.context_fn is not noop_context_fn:
            given["context_fn"] = options.context_fn
        return (torch_checkpoint.checkpoint if dynamo else _torch.original_checkpoint)(
            functools.partial(f, **kwargs) if kwargs else f,
            *args,
            use_reentrant=False,
            preserve_rng_state=options.preserve_rng_state,
            determinism_check=options.determinism_check,
            debug=options.debug,
            early_stop=options.early_stop,
            **given,
        )
    if not torch.is_grad_enabled():
        return f(*args, **kwargs)
    enabled = _torch.checkpoint_debug_enabled()
    if enabled is not None:
        options = options._replace(debug=enabled)
    if options.debug and options.context_fn is not noop_context_fn:
        raise OptionError(f"{title(f)}: debug=True is incompatible with non-default context_fn.")
    is_transformed = _torch.maybe_current_level() is not None or _torch.in_dual_level()
    if is_transformed or (_use_transforms and _is_known(f, args, kwargs, options)):
        return _functional(f, args, kwargs, options)
    if (ask := instead.get()) is not None:
        return ask(
            f,
            title(f),
            lambda: f(*args, **kwargs),
            lambda **changes: _by_hooks(f, args, kwargs, options._replace(**_contexts(**changes))),
        )
    return _by_hooks(f, args, kwargs, options)


# -- the hook path ------------------------------------------------------------------------------


def _contexts(**changes: Any) -> dict[str, Any]:
    """The options of `remat` as those of `checkpoint`."""
    if "policy" in changes:
        policy = changes.pop("policy")
        selective = functools.partial(create_selective_checkpoint_contexts, policy)
        changes["context_fn"] = noop_context_fn if policy is None else selective
    return changes


def _by_hooks(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> Any:
    stop = _torch.checkpoint_early_stop()
    contexts: Any = None
    if options.debug:
        contexts = Log(), Log()
    elif options.context_fn is not noop_context_fn:
        contexts = options.context_fn()
        _look_after_hooks(f, contexts[0], bool(options.respect_saved_tensors_hooks))
    region = Region(
        f,
        args,
        kwargs,
        preserve_rng_state=options.preserve_rng_state,
        check=options.determinism_check != "none",
        early_stop=options.early_stop if stop is None else stop,
        contexts=contexts,
    )
    if region.is_lazy:
        return f(*args, **kwargs)
    try:
        return _torch.without_dynamo(region.run)(f, args, kwargs)
    except RuntimeError as error:
        # With hooks of the caller active, the functional path would be refused as well.
        if _torch.REFUSES_HOOKS not in str(error) or _torch.top_saved_tensors_hooks() is not None:
            raise
        region.undo()
    with suppress(TypeError):  # there is no weak reference to some objects
        _use_transforms.add(_key(f, args, kwargs))
    return _functional(f, args, kwargs, options)


def _look_after_hooks(f: Any, forward: Any, respect: bool) -> None:
    """Tell a selective forward whether what it saves goes through the hooks of the caller, and those."""
    if isinstance(forward, Forward):
        forward.respect_saved_tensors_hooks = respect
        hooks = _torch.top_saved_tensors_hooks()
        forward.hooks = None if is_of_checkpoint(hooks) else hooks
    elif is_selective(forward):
        if respect:
            raise OptionError(
                f"{title(f)}: respect_saved_tensors_hooks=True with contexts of torch's. Make them with "
                "funcckpt.create_selective_checkpoint_contexts."
            )
        # Torch 2.15 would warn of ours, which it takes for the caller's.
        forward.respect_saved_tensors_hooks = False


# -- the functional path ------------------------------------------------------------------------

# Calls that were seen to use a transform, which refuses hooks.
_use_transforms: set[Any] = set()


def _key(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The functions and modules of a call: a helper may do quite different things with what it is given."""
    while isinstance(f, functools.partial):
        f, args, kwargs = f.func, (*f.args, *args), {**f.keywords, **kwargs}
    return tuple([weakref.ref(_code(x)) for x in pytree.tree_leaves(((f, args), kwargs)) if callable(x)])


def _is_known(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> bool:
    with suppress(TypeError):
        return options.context_fn is noop_context_fn and _key(f, args, kwargs) in _use_transforms
    return False


def _code(f: Any) -> Any:
    if isinstance(f, MethodType):
        f = f.__self__ if isinstance(f.__self__, nn.Module) else f.__func__
    # Closures share their code, and may call quite different things.
    return f.__code__ if isinstance(f, FunctionType) and not f.__closure__ else f


def call_under_compiled_transform(
    f: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """The call under a transform, in code that Dynamo traces."""
    if options.context_fn is not noop_context_fn:
        compiled.refuse(f"checkpoint({name}): under torch.func transforms, context_fn")
    return call_compiled(f, name, args, kwargs, options.preserve_rng_state, options.determinism_check)


def _functional(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    g, policy = f, None
    if patched.is_active():
        g = _patched(f)
    if options.context_fn is not noop_context_fn:
        contexts = options.context_fn()
        if isinstance(contexts[0], Forward) and isinstance(contexts[1], Recompute):
            policy = contexts[0].policy
        else:
            g = _in_contexts(g, *contexts)
    return remat(
        g,
        preserve_rng_state=options.preserve_rng_state,
        determinism_check=options.determinism_check,
        policy=policy,
    )(*args, **kwargs)


def _patched(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, with the checkpoints inside of it as in the forward, whenever it is run."""

    @functools.wraps(f, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with patched.active(True):
            return f(*args, **kwargs)

    return run


def _in_contexts(
    f: Callable[..., Any], forward: AbstractContextManager[Any], recompute: AbstractContextManager[Any]
) -> Callable[..., Any]:
    for context in (forward, recompute):
        if is_selective(context):
            raise OptionError(
                f"{title(f)}: torch's contexts for selective checkpointing (context_fn) match the operators "
                "of the recomputation with those of the forward one by one, which cannot be done under "
                "torch.func transforms or in forward mode, where the two differ. Make them with "
                "funcckpt.create_selective_checkpoint_contexts."
            )
    # An iterator, since a recomputation finds variables and attributes as they were at the call.
    runs = itertools.count()

    @functools.wraps(f, updated=())
    def in_contexts(*args: Any, **kwargs: Any) -> Any:
        with recompute if next(runs) else forward:
            return f(*args, **kwargs)

    return in_contexts


def is_selective(context: Any) -> bool:
    """Whether a context belongs to `create_selective_checkpoint_contexts`, ours or torch's."""
    theirs = isinstance(context, TorchDispatchMode) and type(context).__module__ == torch_checkpoint.__name__
    return theirs or isinstance(context, (Forward, Recompute))


class Log(TorchDispatchMode):
    """The operators that were run, one a line. Started anew each time that it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> Any:
        self.lines.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results, given = (
            ", ".join([describe(x) if isinstance(x, Tensor) else repr(x) for x in pytree.tree_leaves(tree)])
            for tree in (out, (args, kwargs or {}))
        )
        self.lines.append(f"{results} = {func}({given})")
        return out


patched.serve(checkpoint)
