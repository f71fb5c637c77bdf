"""Modules that are recomputed: `Remat`, `apply_remat`, `remove_remat`, `Sequential`.

Only the class of a module changes: it becomes a subclass of `Remat` and of the old class, which has the
options. Its `forward` calls the old one through `checkpoint`. So names of parameters and keys of `state_dict`
stay, `isinstance` holds, and hooks on the module run once, outside of the checkpoint.
(`torch.distributed.fsdp.fully_shard` changes modules in the same way.)
"""

from __future__ import annotations

import fnmatch
import inspect
import re
import types
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from ..closures.code import is_library
from ..core.call import has_hook_of_opacus
from ..eager.checkpoint import call, check_options
from ..eager.region import Options
from ..eager.sequential import chain, start_behind_writers, writes_to_input
from ..errors import InputError, OptionError, check_positive
from ..policies.policies import as_function
from ..remat import is_module_class

M = TypeVar("M", bound=nn.Module)
Select = type | tuple[type, ...] | str | Callable[[str, nn.Module], bool]

# The attribute with the options, of the class: so copies, slices and other instances have them, too.
_KEY = "_funcckpt_options"


if TYPE_CHECKING:

    class _KeepsItsType(type):
        """`Remat(module)` has the type of the module. (Mypy sees a Remat with any attributes.)"""

        def __call__(cls, module: M, **options: Any) -> M: ...  # type: ignore[empty-body, override]

else:
    _KeepsItsType = type


class Remat(nn.Module, metaclass=_KeepsItsType):
    """Make a module recompute its forward in the backward, instead of keeping what it computed.

    The module is changed in place and returned. Wrap the parts of a model, such as its blocks: one `Remat`
    around the whole model saves nothing. Copies and pickles are checkpointed, too. `remove_remat` undoes it.

    Parameters
    ----------
    module : nn.Module
        What to recompute. If it is a `Remat` already, it gets these options. A module without a forward
        (a `ModuleList`), or with one assigned to the instance (by `torch.compile`), raises an InputError.
    **options
        Those of :func:`funcckpt.checkpoint`, except `use_reentrant`: ``policy=`` and the others.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from funcckpt.nn import Remat
    >>> model = nn.Sequential(Remat(nn.Sequential(nn.Linear(3, 8), nn.Tanh())), nn.Linear(8, 3))
    >>> def loss(parameters, x):
    ...     return torch.func.functional_call(model, parameters, (x,)).sum()
    >>> per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    >>> per_sample(dict(model.named_parameters()), torch.ones(5, 3))["0.0.weight"].shape
    torch.Size([5, 8, 3])
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **options: Any) -> Any:
        if cls is not Remat:  # another instance of the class of a checkpointed module
            new: Any = super().__new__
            return new(cls) if new is object.__new__ else new(cls, *args, **options)
        module, *others = args or (options.pop("module", None),)
        if others:
            raise OptionError("Remat takes one module. Pass its options by keyword.")
        module.__class__ = _checked_class(module, options)
        return module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Python also calls this on the result of `Remat(module)`, which is initialized already.
        if "_modules" not in self.__dict__:
            super().__init__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class cannot be found by its name.
        make, args, *state = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        make, *args = [_original(type(self)) if x is type(self) else x for x in (make, *args)]
        return _make_again, (make, (*args,), getattr(self, _KEY)), *state


def _checked_class(module: Any, options: dict[str, Any]) -> type[nn.Module]:
    """The class that a module gets. Raises if it cannot be wrapped."""
    name = type(module).__name__
    if is_module_class(module):
        raise InputError(f"Remat takes an nn.Module, not a class: write Remat({module.__name__}(...)).")
    if not isinstance(module, nn.Module):
        raise InputError(f"Remat takes an nn.Module, not {name}: use funcckpt.remat for functions.")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"Remat({name}): a TorchScript module cannot be wrapped. Wrap it before scripting.")
    if "forward" in module.__dict__:
        raise InputError(
            f"Remat({name}): a forward was assigned to this instance, as torch.compile and accelerate do. "
            "Wrap the module before that, or use funcckpt.checkpoint(module, ...) where it is called."
        )
    if has_hook_of_opacus(module):  # it looks up how to differentiate a layer by its class
        raise InputError(f"Remat({name}): wrap layers before Opacus' GradSampleModule is made of the model.")
    if type(module).forward is nn.Module.forward:
        raise InputError(f"Remat({name}): the module has no forward. Wrap the modules inside of it.")
    kind: Any = type(module)
    options = _checked_options(f"Remat({name})", options)
    changed = _checkpointed_class(kind, options)
    try:
        module.__class__ = changed
        module.__class__ = kind
    except TypeError as error:  # Python compares the first bases
        advice = f"Let nn.Module be the first base, as in class {name}(nn.Module, ABC)"
        raise InputError(f"Remat({name}): its class cannot change: {error}. {advice}.") from error
    return changed


def _checked_options(title: str, options: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted({*options} - {*Options._fields}):
        raise OptionError(f"{title} has no option {unknown}. The options are {sorted(Options._fields)}.")
    check_options(title, Options(**options))
    if isinstance(policy := options.get("policy"), (list, tuple, set, frozenset)):
        options["policy"] = as_function(policy, title)  # a function that can be pickled
    return options


def _checkpointed_class(kind: type[nn.Module], options: dict[str, Any]) -> type[nn.Module]:
    kind = _original(kind) if issubclass(kind, Remat) else kind
    for known in kind.__subclasses__():
        if known.__bases__[1:] == (kind,) and _are_same(vars(known).get(_KEY), options):
            return known

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(super(Remat, self).forward, args, kwargs, Options(**getattr(self, _KEY)))

    if isinstance(inspect.getattr_static(kind, "forward"), types.FunctionType):
        # Libraries pass what the signature has.
        cast(Any, forward).__signature__ = inspect.signature(kind.forward)
    contents: dict[str, Any] = {_KEY: _Given(options), "__module__": kind.__module__, "__doc__": kind.__doc__}
    becomes = getattr(kind, "cls_to_become", None)
    if becomes is not None:  # a lazy module changes its class in its first call
        contents["cls_to_become"] = _checkpointed_class(becomes, options)
    # The search for what the module refers to skips classes of this package, and so this forward. And a
    # registry of classes must not get this one.
    of_around = {"forward": forward, "__module__": __name__, "__init_subclass__": lambda cls: None}
    around = type("RematForward", (Remat,), of_around)
    # A metaclass of the user's may be a registry, too, or ask for more than these.
    maker: Any = next(x for x in type(kind).__mro__ if is_library(x.__module__))
    what = f"Remat{kind.__name__}", (around, kind), contents
    made: type[nn.Module] = maker.__new__(type(kind), *what)
    maker.__init__(made, *what)
    return made


class _Given(dict[str, Any]):
    """Options as they were given. Copies of a module have the same, and so the same class."""

    def __deepcopy__(self, memo: Any) -> _Given:
        return self


def _are_same(old: dict[str, Any] | None, new: dict[str, Any]) -> bool:
    """Whether options are the same. Two policies that are equal may be asked differently later."""
    if old is None:
        return False
    pairs = zip(Options(**old), Options(**new), strict=True)
    return all([x is y or (isinstance(x, str) and x == y) for x, y in pairs])


def _original(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module before `Remat`."""
    if _KEY not in vars(kind):
        raise InputError(
            f"{kind.__name__}: the class of this module was changed again after Remat, for example by "
            "fully_shard or parametrize. Undo that first."
        )
    return cast("type[nn.Module]", kind.__bases__[1])


def _make_again(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    module = make(*args)
    module.__class__ = _checkpointed_class(type(module), options)
    return module


# -- whole models ---------------------------------------------------------------------------------


def apply_remat(model: M, select: Select, **options: Any) -> M:
    """Make the selected modules of a model recompute their forward, in place.

    Parameters
    ----------
    model : nn.Module
        The model, which is changed and returned. If nothing is selected, or a selected module cannot be
        wrapped, an InputError is raised, and nothing is changed.
    select : class, tuple of classes, str, or callable
        Which modules. A class, or its name (``"Block"``): the modules of this class. A pattern for names,
        such as ``"layers.*"`` or ``"*.block[0-4]"``; a star stands for a part of a name without dots. If no
        name matches, those whose last parts match. ``"every 2"``: the first, third, fifth, ... member of each
        outermost `ModuleList` or `Sequential`; if a member has no forward, the modules inside of it; but
        no activation with ``inplace=True``, which writes to its input. A function: those for which
        ``select(name, module)`` is true.
    **options
        Those of :class:`Remat`.

    Examples
    --------
    >>> from torch import nn
    >>> from funcckpt.nn import apply_remat, remove_remat
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 4)
    >>> _ = remove_remat(apply_remat(model, nn.TransformerEncoderLayer))
    >>> _ = apply_remat(model, "every 2", preserve_rng_state=False)
    >>> [type(layer).__name__ for layer in model.layers][:2]
    ['RematTransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    chosen = _selected(model, select)
    if not chosen:
        has_lists = any([isinstance(m, (nn.ModuleList, nn.Sequential)) for m in model.modules()])
        raise InputError(
            f"apply_remat: {select!r} selects nothing in {type(model).__name__}. Name a class or a pattern "
            "that matches some of its named_modules()"
            + (", or pass 'every 1', for the members of its lists of modules." if has_lists else ".")
        )
    for module, kind in [(module, _checked_class(module, options)) for module in chosen]:
        cast(Any, module).__class__ = kind
    return model


def _check_model(taker: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(f"{taker} takes a module, not {kind}. For a function, there is funcckpt.remat.")


def _selected(model: nn.Module, select: Any) -> list[nn.Module]:
    _check_model("apply_remat", model)
    named = list(model.named_modules())
    if isinstance(select, (type, tuple)):
        with suppress(TypeError):  # what else than classes is in the tuple
            return [m for _, m in named if isinstance(cast(Any, m), select)]
    if isinstance(select, str):
        if every := re.fullmatch(r"every +([1-9]\d*)", select):
            return _every(model, int(every[1]))
        if of_class := [m for _, m in named if select in [kind.__name__ for kind in type(m).__mro__]]:
            return of_class
        pattern = select.split(".")
        parts = [(name.split("."), m) for name, m in named if name]
        ends = [(name, m) for name, m in parts if all(map(fnmatch.fnmatchcase, name[::-1], pattern[::-1]))]
        ends = [(name, m) for name, m in ends if len(name) >= len(pattern)]
        return [m for name, m in ends if len(name) == len(pattern)] or [m for _, m in ends]
    if isinstance(select, nn.Module):
        raise InputError(
            f"select= takes no {type(select).__name__}. Pass its class or name; or use Remat on it."
        )
    if not callable(select):
        raise InputError(
            f"select={select!r} is not a class or a tuple of them, not a pattern, and not a function of name "
            "and module."
        )
    try:
        inspect.signature(select).bind("", model)
    except TypeError:
        what = "select= takes a name and a module: lambda name, module: isinstance(module, Block)."
        raise InputError(what) from None
    except ValueError:  # a builtin function has no signature
        pass
    return [m for name, m in named if select(name, m)]


def _every(module: nn.Module, n: int) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        members = [found for member in list(module)[::n] for found in called(member).values()]
        return [m for m in members if not writes_to_input(m)]
    return [member for child in module.children() for member in _every(child, n)]


def called(module: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """By name: the module; or those inside of it, if it has no forward, as a `ModuleList` in another."""
    if type(module).forward is not nn.Module.forward:
        return {name: module}
    return {k: m for key, child in module.named_children() for k, m in called(child, f"{name}.{key}").items()}


def remove_remat(model: M) -> M:
    """Undo :class:`Remat` and :func:`apply_remat` in a model and in all of its modules, in place.

    If the class of a module was changed again after `Remat`, it raises an InputError, and changes nothing.

    Examples
    --------
    >>> from torch import nn
    >>> from funcckpt.nn import Remat, remove_remat
    >>> remove_remat(Remat(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    _check_model("remove_remat", model)
    found = [(m, _original(type(m))) for m in model.modules() if isinstance(m, Remat)]
    for module, kind in found:
        cast(Any, module).__class__ = kind
    return model


# -- a chain ----------------------------------------------------------------------------------------


class Sequential(nn.Sequential):
    """An `nn.Sequential` that recomputes its layers in groups.

    Parameters
    ----------
    *layers : nn.Module, or one OrderedDict of them
        As for `nn.Sequential`; the keys of ``state_dict`` are the same.
    every : int
        How many layers are recomputed together. A group that would start with activations with
        ``inplace=True``, which write to their input, starts behind them.
    skip_last : bool
        Whether the last layer is kept: its backward comes first, so that recomputing it saves nothing.
    **options
        Those of :class:`Remat`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from funcckpt.nn import Sequential
    >>> model = Sequential(*[nn.Linear(4, 4) for _ in range(6)], every=2, skip_last=True)
    >>> torch.func.vmap(torch.func.jacrev(model))(torch.ones(3, 4)).shape
    torch.Size([3, 4, 4])
    """

    def __init__(self, *layers: Any, every: Any = 1, skip_last: bool = False, **options: Any) -> None:
        super().__init__(*layers)
        self.options = _checked_options("Sequential", options)
        check_positive("Sequential", every=every)
        self.every = every
        self.skip_last = skip_last

    def forward(self, input: Any) -> Any:
        layers = list(self)
        count = len(layers) - self.skip_last
        starts = [0, *[start_behind_writers(layers, i) for i in range(self.every, count, self.every)]]
        for start, end in pairwise(sorted({*[min(start, count) for start in starts], count})):
            input = call(chain(layers[start:end]), (input,), {}, Options(**self.options))
        return chain(layers[count:])(input)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        layers = OrderedDict(list(self._modules.items())[index])
        return Sequential(layers, every=self.every, skip_last=self.skip_last, **self.options)
