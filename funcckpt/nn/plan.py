"""Which blocks to recompute, so that a step fits into a given number of bytes.

Each plan is measured: the whole step runs under a meter. Few runs are enough, since blocks are alike: what a
choice saves and recomputes is measured for all blocks of a kind at once. The first and the last block are
kinds of their own, since the peak is next to one of them. Assuming that savings add up, these numbers give
the plans that may be best. Bisection finds the cheapest of them that fits. Of equal plans two are tried, with
early or with late blocks recomputed: what early blocks keep is alive for longer.
"""

from __future__ import annotations

import copy
import inspect
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import world
from .._torch import functorch
from ..closures import Found
from ..errors import FuncckptError, InputError, OptionError, TransformError, check_positive
from ..inspect.explain import BYTES, in_units
from ..meter import Meter
from ..policies import dots_saveable, nothing_saveable
from ..policies.policies import names_of
from ..tape.operators import tensors_in
from . import modules

M = TypeVar("M", bound=nn.Module)
_Choices = tuple[str, ...]  # "keep", the name of a policy, or "recompute", for each block


class Block(NamedTuple):
    """One block in a :class:`Plan`."""

    name: str  #: as in ``model.named_modules()``
    choice: str  #: "keep", the name of a policy, or "recompute"
    kept_bytes: int  #: alive after its forward and not before; its output is among them
    recomputed_flops: int  #: by this block


@dataclass(frozen=True)
class Plan:
    """What :func:`fit` has found. Its `str` is a table."""

    blocks: tuple[Block, ...]  #: in the order in which the step calls them
    bytes: int  #: the limit that was given
    peak_bytes_before: int  #: with all blocks kept
    flops_before: int  #: with all blocks kept
    peak_bytes: int  #: with this plan, as measured
    flops: int  #: with this plan, as measured
    chunk_size: int | None  #: the value for the step's parameter chunk_size, if it has one
    policies: Mapping[str, Any] = field(repr=False)  #: by the names that the choices have

    @property
    def recomputed_flops(self) -> int:
        return self.flops - self.flops_before

    def apply(self, model: M) -> M:
        """Recompute the blocks of a model as planned, in place, and return the model.

        `model` may be another one whose blocks have the same names. A `Remat` on these blocks is replaced.
        """
        return _apply(model, {block.name: block.choice for block in self.blocks}, self.policies)

    def __str__(self) -> str:
        rows = [("blocks", "choice", "each keeps", "recomputed FLOPs")]
        for _, alike in groupby(self.blocks, lambda block: (block.name.rpartition(".")[0], *block[1:])):
            first, *others = alike
            name = f"{first.name} to {others[-1].name}" if others else first.name
            rows.append((name, first.choice, in_units(first.kept_bytes, BYTES), in_units(first[3])))
        left, right = [max([len(row[i]) for row in rows]) for i in (0, 1)]
        lines = [f"{name:{left}}  {choice:{right}}{n:>13}{m:>18}" for name, choice, n, m in rows]
        peaks = [in_units(n, BYTES) for n in (self.peak_bytes_before, self.peak_bytes, self.bytes)]
        lines.append("peak: {} before, {} after, {} allowed".format(*peaks))
        share = 100 * self.recomputed_flops / max(self.flops_before, 1)
        lines.append(f"recomputed: {in_units(self.recomputed_flops)} FLOPs, {share:.1f} %")
        return "\n".join([*lines, *[f"chunk_size: {self.chunk_size}"] * (self.chunk_size is not None)])


def fit(
    model: nn.Module,
    step: Callable[..., Any],
    /,
    *batch: Any,
    bytes: int,
    select: modules.Select | None = None,
    policies: Sequence[Any] = (dots_saveable,),
    measure_on: str | torch.device = "meta",
    progress: bool | None = None,
) -> Plan:
    """Choose which blocks to recompute, so that a step fits into `bytes` with the fewest recomputed FLOPs.

    ``step(model, *batch)`` does all the work on a batch: `backward()`, transforms, an optimizer that it makes
    itself. It runs on copies of `model` and `batch`: once if all fits, otherwise ten to fifty times or more.
    If it has a parameter `chunk_size`, the length of the batch and the powers of two below it are tried, the
    largest first, until nothing is recomputed. The plan has the largest chunk size with the fewest
    recomputed FLOPs.

    Parameters
    ----------
    bytes : int
        The most bytes that the step may have alive at a time, beside the model and the batch.
    select : class, tuple of classes, str, or callable
        The blocks, as for :func:`apply_remat`, but none inside of another one. If not given: the members of
        each `ModuleList` or `Sequential` whose members are of one class; if these have no forward, the
        modules inside of them.
    policies : sequence
        Policies to try for each block, beside keeping all and recomputing all.
    measure_on : str or torch.device
        The device of the copies. On "meta" they take no memory and have no values.
    progress : bool
        Whether to count the runs on stderr. If not given: only if stderr is a terminal.

    Returns
    -------
    Plan
        Print it, and call ``plan.apply(model)``.

    Raises
    ------
    OptionError
        No plan fits into `bytes`. The message has the lowest peak that was found.
    InputError
        There are no blocks, or the step does not run on meta tensors.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from funcckpt.nn import fit
    >>> model = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 128) for _ in range(4)])
    >>> def step(model, x):
    ...     model(x).square().sum().backward()
    >>> plan = fit(model, step, torch.ones(64, 8, 32), bytes=4 * 2**20, policies=())
    >>> [(block.name, block.choice) for block in plan.blocks]
    [('0', 'recompute'), ('1', 'recompute'), ('2', 'recompute'), ('3', 'keep')]
    >>> type(plan.apply(model)[0]).__name__
    'RematTransformerEncoderLayer'
    """
    check_positive("fit", Real, bytes=bytes)
    if functorch.maybe_current_level() is not None:
        raise TransformError("fit: under a transform the step cannot be measured. Plan before it.")
    if not isinstance(model, nn.Module):
        raise InputError(f"fit takes a model, then a step: {type(model).__name__} is no nn.Module.")
    names = _blocks(model, select)
    if not callable(step):
        raise InputError(f"fit: step must be a function of model and batch, not {type(step).__name__}.")
    if not isinstance(policies, Sequence) or isinstance(policies, str):
        raise OptionError(f"fit: policies must be a list or tuple of policies, not {policies!r}.")
    choices = dict(zip(names_of("fit", policies, ("keep", "recompute")), policies, strict=True))
    show, runs = sys.stderr.isatty() if progress is None else progress, count(1)

    def run(size: int | None, *arguments: Any, **more: Any) -> _Cost:
        if show:
            print(f"fit: run {next(runs)} of the step", end="\r", file=sys.stderr, flush=True)
        return _run((model, step, batch, torch.device(measure_on)), size, *arguments, **more)

    plans: list[Plan] = []
    for size in _chunk_sizes(step, batch):
        plans.append(_search(partial(run, size), names, choices, bytes, size))
        if plans[-1].peak_bytes <= bytes and not plans[-1].recomputed_flops:
            break
    best = min(plans, key=lambda plan: (max(0, plan.peak_bytes - bytes), plan.recomputed_flops))
    if (least := best.peak_bytes) > bytes:
        raise OptionError(
            f"fit: bytes={bytes:,} is too little. The lowest peak that was found is {least:,} bytes "
            f"({in_units(least, BYTES)}). Make the batch smaller, or select other blocks."
        )
    return best


def _blocks(model: nn.Module, select: Any) -> list[str]:
    if select is None:
        names = _repeated(model, "")
        why = "there is no ModuleList or Sequential of modules of one class. Pass select=, "
    else:
        chosen = set(modules._selected(model, select))
        chosen = chosen - {model} or chosen  # the whole model only if it is alone
        inside = {m for outer in chosen for m in outer.modules() if m is not outer}
        names = [name for name, module in model.named_modules() if module in chosen - inside]
        why = f"select={select!r} selects nothing. Pass "
    if not names:
        raise InputError(f"fit: in {type(model).__name__} {why}a class or a pattern, as to apply_remat.")
    return names


def _repeated(module: nn.Module, prefix: str) -> list[str]:
    """The members of lists. If no two members are alike (stages), those of the lists inside, if any."""
    children = {prefix + name: child for name, child in module.named_children()}
    kinds = [_kind(child) for child in children.values()]
    inside = [found for name, child in children.items() for found in _repeated(child, f"{name}.")]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len({kind for kind, _ in kinds}) == 1
    some_alike = len(set(kinds)) < len(kinds)
    if not (is_list and len(kinds) > 1 and (some_alike or not inside)):
        return inside
    return [found for name, child in children.items() for found in modules.called(child, name)]


def _kind(module: nn.Module) -> tuple[Any, ...]:
    kind = modules._original(type(module)) if isinstance(module, modules.Remat) else type(module)
    return kind, tuple([(name, p.shape) for name, p in module.named_parameters()])


def _chunk_sizes(step: Any, batch: Any) -> list[Any]:
    if "chunk_size" not in inspect.signature(step).parameters:
        return [None]
    length = next((len(x) for x in tensors_in(batch) if x.dim()), 1)
    return sorted({length, *[2**i for i in range(length.bit_length())]}, reverse=True)


def _apply(model: M, choices: Mapping[str, str], policies: Mapping[str, Any]) -> M:
    try:
        blocks = {model.get_submodule(name): choice for name, choice in choices.items()}
    except AttributeError as error:
        kind = type(model).__name__
        raise InputError(f"Plan.apply: {kind} lacks a block of the plan: {error}") from None
    for block in blocks:
        modules.remove_remat(block)
    for block, choice in blocks.items():
        if choice != "keep":
            modules.Remat(block, policy=policies[choice])
    return model


# -- runs of the step ---------------------------------------------------------------------------------


_Job = tuple[nn.Module, Callable[..., Any], tuple[Any, ...], torch.device]


class _Cost(NamedTuple):
    peak_bytes: int
    flops: int
    kept_bytes: dict[str, int]  # by block
    kinds: dict[str, Any]  # by block, in the order of calls


class _CopyTo(TorchFunctionMode):
    """Lets `copy.deepcopy` make tensors on a given device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):  # a Parameter clones its data
            return args[0].detach().to(self.device, copy=True).requires_grad_(args[0].requires_grad)
        return func(*args, **(kwargs or {}))


class _OnMeta(world.Mode):
    """Tensors made of a number keep their value: optimizers read their count of steps. Refuses autocast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if world.autocasts():
            raise OptionError(
                'fit: autocast casts nothing on "meta", so the bytes would be wrong. Pass measure_on="cpu", '
                "or the device of the model."
            )
        if func is torch.tensor and isinstance(args[0], (int, float)):
            kwargs = {"device": "cpu", **(kwargs or {})}
        return func(*args, **(kwargs or {}))


def _run(job: _Job, chunk_size: int | None, plan: Mapping[str, str], policies: Mapping[str, Any]) -> _Cost:
    """Run the step on copies of the model and the batch."""
    model, step, batch, device = job
    with _CopyTo(device):
        model, batch = copy.deepcopy((model, batch))
    _apply(model, plan, policies)
    meter, kept, kinds = Meter(), dict[str, int](), dict[str, Any]()

    def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        kinds.setdefault(name, (_kind(block), *[x.shape for x in tensors_in((args, kwargs))]))
        kept[name] = -meter.live_bytes

    def leave(name: str, block: nn.Module, args: Any, out: Any) -> None:
        kept[name] += meter.live_bytes

    for name in plan:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
        block.register_forward_hook(partial(leave, name))
    on_meta = device.type == "meta"
    streams = world.states(world.random_streams(Found(step).streams, of_the_process=True))
    try:
        with device if on_meta else nullcontext(), _OnMeta() if on_meta else nullcontext(), meter:
            step(model, *batch, **({} if chunk_size is None else {"chunk_size": chunk_size}))
    except Exception as error:
        # The step has run on meta tensors with all blocks kept: another error is that of a recomputed block.
        if not on_meta or isinstance(error, FuncckptError) or {*plan.values()} - {"keep"}:
            raise
        at = "" if meter.running is None else f" at {meter.running}"
        raise InputError(
            f"fit: the step fails on meta tensors{at}: {error}. Call the model that the step is given, and "
            'pass all other tensors as the batch. If it reads values, pass measure_on="cpu".'
        ) from error
    finally:  # no lock: a backward may draw in another thread
        world.set_streams(streams)
    return _Cost(meter.peak_bytes, meter.flops, kept, kinds)


# -- the search ---------------------------------------------------------------------------------------


def _search(
    run: Callable[..., _Cost], names: list[str], given: Mapping[str, Any], bytes: int, chunk_size: int | None
) -> Plan:
    """The plan with the fewest FLOPs that fits; if none fits, the one with the lowest peak."""
    policies = {**given, "recompute": None}
    run = partial(run, policies=policies)
    before = run(dict.fromkeys(names, "keep"))
    names = [*before.kinds]
    if not names:
        raise InputError("fit: step calls no block. It must call the model that is its first argument.")
    keep = best = ("keep",) * len(names)
    costs = {keep: before}
    kinds = [(before.kinds[name], i if i in (0, len(names) - 1) else None) for i, name in enumerate(names)]
    # For each kind and choice: the bytes that one block saves, and the FLOPs that it costs.
    effects = {kind: {"keep": (0, 0)} for kind in kinds}

    def peak_of(plan: _Choices) -> int:
        if plan not in costs:
            costs[plan] = run(dict(zip(names, plan, strict=True)))
        return costs[plan].peak_bytes

    def fits(plan: _Choices) -> bool:
        return peak_of(plan) <= bytes

    if not fits(keep):
        # Under a double backward hooks save nothing, and policies do (docs/modules.md).
        policies["recompute"] = min(
            (None, nothing_saveable),
            key=lambda way: run(dict.fromkeys(names, "recompute"), policies={"recompute": way}).peak_bytes,
        )
        for choice in policies:
            run(dict.fromkeys(names, choice))  # later recomputations skip some operators of the first
            peak_of((choice,) * len(names))
            for kind in effects:
                alone = tuple([choice if other == kind else "keep" for other in kinds])
                saved, flops = before.peak_bytes - peak_of(alone), costs[alone].flops - before.flops
                # Plus one: of two plans with the same FLOPs, the one that wraps fewer blocks is better.
                effects[kind][choice] = saved // kinds.count(kind), flops // kinds.count(kind) + 1
        each, grain = [effects[kind] for kind in kinds], before.peak_bytes // 1000
        late = [plan[::-1] for plan in _promising(each[::-1], grain)]
        both = [*zip(_promising(each, grain), late, strict=False)]
        bisect_left(both, True, key=lambda plans: any(map(fits, plans)))
        fitting = [*filter(fits, [*costs])] or [min(costs, key=peak_of)]
        best = min(fitting, key=lambda plan: (costs[plan].flops, -plan.count("keep")))
    cost = costs[best]
    blocks = [
        Block(name, choice, cost.kept_bytes[name], max(0, effects[kind][choice][1] - 1))
        for name, choice, kind in zip(names, best, kinds, strict=True)
    ]
    measured = before.peak_bytes, before.flops, cost.peak_bytes, cost.flops
    return Plan(tuple(blocks), bytes, *measured, chunk_size, policies)


def _promising(effects: list[dict[str, tuple[int, int]]], grain: int) -> list[_Choices]:
    """Plans in order of FLOPs. Each saves at least `grain` bytes more than all before it."""
    plans: list[tuple[int, int, _Choices]] = [(0, 0, ())]
    for of_block in effects:
        # Of equal plans, the first one recomputes the early blocks.
        longer = [
            (saved + more, flops + again, (*plan, choice))
            for saved, flops, plan in reversed(plans)
            for choice, (more, again) in of_block.items()
        ]
        plans = []
        for found in sorted(longer, key=lambda plan: (plan[1], -plan[0])):
            if not plans or found[0] > plans[-1][0] + grain:
                plans.append(found)
    return [plan for _, _, plan in plans]
