"""`remat(f)`: the user's function, checkpointed. Its options, the decorator, and one call.

Each call makes a program, `call.Call`. `dispatch` runs it under the transforms that are active, and keeps
only its inputs.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, cast, get_args, overload

import torch
from torch import nn

from . import compiled
from ._torch import wrappers
from .core.call import Call, Options
from .errors import InputError, OptionError
from .policies.policies import Policy, chooser_of, nothing_saveable

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")

Check = Literal["default", "none", "values"]
CHECKS = get_args(Check)


def check_determinism(title: str, check: Any) -> None:
    """Raise if the option determinism_check is invalid."""
    if check not in CHECKS:
        raise OptionError(f"{title}: determinism_check must be one of {CHECKS}, not {check!r}.")


class _Options(TypedDict, total=False):
    """The options of `remat`, for type checkers."""

    static_argnums: Any
    static_argnames: Any
    preserve_rng_state: bool
    determinism_check: Check
    policy: Policy | None
    prevent_cse: bool


@overload
def remat(f: Callable[P, R], **options: Unpack[_Options]) -> Callable[P, R]: ...


@overload
def remat(f: None = None, **options: Unpack[_Options]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def remat(
    f: Callable[..., Any] | None = None,
    *args: Any,
    static_argnums: Any = (),
    static_argnames: Any = (),
    preserve_rng_state: bool = True,
    determinism_check: Check = "default",
    policy: Policy | None = None,
    prevent_cse: bool = True,
) -> Any:
    """Recompute f in the backward instead of keeping what it computed.

    The returned function has the arguments and results of f. It works under any composition of
    `torch.func` transforms, and in plain autograd (in plain forward mode f runs as it is). Between the
    forward and the backward only its inputs are kept: the tensors among the arguments, and those that f
    captured.

    Parameters
    ----------
    f : callable
        Any callable, such as a function, a bound method, a `functools.partial` or an `nn.Module`. Its
        arguments are pytrees of tensors of any dtype, shape and device, and of other values. It must be
        pure, except for random numbers and the buffers of a module in training. Without f, a decorator.
        It is called in a second step, ``remat(f)(*args)``.
    preserve_rng_state : bool
        Whether the recomputation draws the random numbers of the forward. Costs nothing if f draws none.
    determinism_check : {"default", "none", "values"}
        What to compare between the outputs of the forward and of the recomputation. "default": structure,
        shapes, dtypes and devices. "none": nothing. "values": also the values, of which a copy is kept.
    policy : callable, list of operators, or None
        What to keep beside the inputs: one of :mod:`funcckpt.policies`, a list of operators, or a
        function as :func:`create_selective_checkpoint_contexts` takes it. None keeps only the inputs.
    static_argnums, static_argnames, prevent_cse
        Options of `jax.checkpoint`, without effect here. Arguments that are no tensors are static anyway;
        f gets its containers as equal ones.

    Returns
    -------
    callable
        f, checkpointed.

    Raises
    ------
    InputError
        f or an option has a wrong type, or an argument can be used only once (an iterator).
    OptionError
        An option has an invalid value.
    ClosureError
        f uses a differentiated, batched or dual tensor that was not found. Pass it as an argument.
    MutationError
        An argument or a captured tensor was changed in place: by f, or before the backward.
    OutputError
        f returned tensors inside of an object that is not a pytree node.
    EscapeError
        f stored a differentiated tensor outside of itself.
    CheckpointError
        A recomputation differs from the forward, or is not possible.

    Notes
    -----
    This is `jax.checkpoint`. Griewank and Walther, "Evaluating Derivatives" (2008), chapter 12, describe
    it for loops, and Chen et al. (arXiv 1604.06174) for networks.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import remat
    >>> def loss(w, x):
    ...     return remat(lambda x: torch.tanh(x @ w))(x).sum()
    >>> per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    >>> per_sample(torch.ones(3, 2), torch.zeros(5, 3)).shape
    torch.Size([5, 3, 2])
    """
    if args:
        raise InputError("remat takes only the function. Write remat(f)(x), or checkpoint(f, x).")
    if torch.compiler.is_dynamo_compiling():
        check_determinism("remat", determinism_check)
        policy = None if policy is nothing_saveable else policy
        return _made_compiled(f, preserve_rng_state, determinism_check, policy)
    title = "remat" if f is None else f"remat({name_of(f)})"
    check_determinism(title, determinism_check)
    chooser = chooser_of(policy, title)

    def wrap(f: Callable[..., Any]) -> Any:
        inner: Any = f.__func__ if isinstance(f, staticmethod | classmethod) else f
        name = name_and_check(inner)
        kind = _CheckpointedModule if isinstance(inner, nn.Module) else _Checkpointed
        made: Any = kind(inner, name, Options(preserve_rng_state, determinism_check, chooser))
        return made if inner is f else (staticmethod if isinstance(f, staticmethod) else classmethod)(made)

    return wrap if f is None else wrap(f)


def _made_compiled(f: Callable[..., Any] | None, *options: Any) -> Any:
    """`remat(f)`, made in code that Dynamo traces."""
    how = Options(*options)

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(f, "__name__", None) or type(f).__name__  # Dynamo does not support __qualname__
        return lambda *args, **kwargs: call(f, name, how, args, kwargs)

    return wrap if f is None else wrap(f)


# What `decides` may return in place of a policy: no checkpoint for this call, or the call as it stands.
WITHOUT, AS_IT_IS = object(), object()
# Set by `explain`: is called with f and a title before each checkpoint, and returns one of these or a policy.
decides: ContextVar[Callable[[Any, str], Any] | None] = ContextVar("funcckpt_decides", default=None)


def name_of(f: Any) -> str:
    """What a callable is called in messages."""
    while isinstance(f, functools.partial):
        f = f.func
    # To ask an nn.Module for an attribute that it lacks is slow.
    return (not isinstance(f, nn.Module) and getattr(f, "__qualname__", None)) or type(f).__qualname__


def is_module_class(f: Any) -> bool:
    """Whether f is a class of modules, where a module was meant."""
    return isinstance(f, type) and issubclass(f, nn.Module)


def name_and_check(f: Callable[..., Any], taker: str = "remat") -> str:
    """The name of f in messages. Raises if f is not callable, or a class of modules."""
    right = "{}({}, x)" if taker == "checkpoint" else "{}({})(x)"
    if not callable(f):
        write = f"Write {right.format(taker, 'f')}, not {taker}(f(x))."
        raise InputError(f"{taker} takes a callable, not {type(f).__name__}. {write}")
    if isinstance(f, type) and is_module_class(f):  # each call comes here
        of = f"{f.__name__}(...)"
        raise InputError(f"{taker} takes a module, not its class: write {right.format(taker, of)}.")
    return name_of(f)


class _Checkpointed:
    """The function that `remat` returns. An object, so that a copy of a model copies what f refers to."""

    def __init__(self, f: Callable[..., Any], name: str, options: Options) -> None:
        # The __dict__ of other callables is their state, not an annotation.
        updated = ("__dict__",) if isinstance(f, types.FunctionType) else ()
        # Dynamo of torch 2.11 asks functions written in C for annotations, which they do not have.
        wrapped = f.forward if isinstance(f, nn.Module) else f
        assigned = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(wrapped, name)]
        functools.update_wrapper(self, wrapped, assigned=assigned, updated=updated)
        self._made_of = f, name, options

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return call(*self._made_of, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if torch.compiler.is_dynamo_compiling():  # it takes only methods of functions
            return functools.partial(self, instance)
        return types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"remat({self._made_of[1]})"

    def __reduce__(self) -> Any:
        name: str = getattr(self, "__qualname__", "")
        with suppress(AttributeError):
            if operator.attrgetter(name)(sys.modules.get(self.__module__)) is self:
                return name  # a decorated function is found by its name
        return type(self), self._made_of


# The two ways to register a module: `m.name = value`, and `add_module`, as ModuleList does.
_ASSIGNS, _ADDS = nn.Module.__setattr__.__code__, nn.Module.add_module.__code__


class _CheckpointedModule(_Checkpointed):
    """What `remat(module)` returns: a function. A module that holds it does not register its parameters."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # To register a value, nn.Module asks `isinstance(value, Module)`, which comes here.
        caller, name, module = sys._getframe(1), self._made_of[1], cast("nn.Module", self._made_of[0])
        if caller.f_code in (_ASSIGNS, _ADDS):
            owner, at = caller.f_locals["self"], caller.f_locals["name"]
            what = (
                f"{type(owner).__name__}.{at}: remat({name}) is a function, so its parameters are not "
                "registered. Write funcckpt.nn.Remat(module), which is a module."
            )
            if caller.f_code is _ADDS or at in owner._modules:
                raise InputError(what)
            own = set(owner.parameters())
            if any(p.requires_grad and p not in own for p in module.parameters()):
                warnings.warn(what, stacklevel=3)
        return type(self)

    def __getattr__(self, name: str) -> Any:
        what = "it" if name == "_made_of" else f"remat({self._made_of[1]})"
        advice = " Write funcckpt.nn.Remat(module), which is a module." if hasattr(nn.Module, name) else ""
        raise AttributeError(f"{what} is a function, and has no {name!r}.{advice}")


def call(f: Any, name: str, options: Options, args: Any, kwargs: Any) -> Any:
    """`remat(f, ...)(*args, **kwargs)`; f and the options have been checked."""
    if torch.compiler.is_dynamo_compiling():
        if options.chooser is not None:
            compiled.refuse(f"remat({name}): policy")
        how = functools.partial(call, name=name, options=Options(*options[:2]))
        return compiled.call(how, name, f, args, kwargs)
    if (decide := decides.get()) is not None:
        policy = decide(f, f"remat({name})")
        if policy is WITHOUT:
            return f(*args, **kwargs)
        if policy is not AS_IT_IS:
            options = options._replace(chooser=chooser_of(policy, f"remat({name})"))
    is_recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if is_recorded and not wrappers.in_dual_level():
        # torch.jit would take our results for constants.
        if not torch.jit.is_tracing():  # type: ignore[attr-defined]
            program = Call(f, name, options, args, kwargs)
            if program.is_differentiated():
                return program.call()
    # Nothing is recorded at any level, so there is nothing to save: forward mode and vmap need no checkpoint.
    # f may still switch grad mode on inside. Plain forward and reverse mode are one level: f runs as it is.
    return f(*args, **kwargs)
