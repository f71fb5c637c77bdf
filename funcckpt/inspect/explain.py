"""What each checkpoint in a function saves and costs, measured.

The function runs several times: as it is, without any checkpoint, and without each of its checkpointed
functions. If the last call of one may be useless, it also runs without that call. `remat` and `checkpoint`
ask the context variable `decides` how to make a call, and `Calls` answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from .._torch import autograd
from ..closures import Found, code_of, kinds
from ..eager import patched
from ..meter import Meter
from ..remat import AS_IT_IS, WITHOUT, decides
from .residuals import Residual, Subject

_Key = tuple[str, Any]  # The title of a checkpointed function, and its code.


@dataclass(frozen=True)
class Cost:
    """The bytes and FLOPs of a function and its backward."""

    kept_bytes: int  #: what f has computed and keeps for the backward
    peak_bytes: int  #: the most that are alive at a time
    flops: int  #: with the recomputed ones


@dataclass(frozen=True)
class Site:
    """A checkpointed function inside of f, with all its calls."""

    name: str  #: such as "remat(block)"
    calls: int  #: in the forward
    without: Cost  #: of f, if only this function is not checkpointed
    recomputed_flops: int
    advice: str = ""  #: what to do if it does not help, or not everywhere


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`. Its `str` is a table, with advice below."""

    cost: Cost  #: of f as it is
    without: Cost  #: of f with nothing checkpointed
    sites: tuple[Site, ...]
    residuals: list[Residual] = field(repr=False)  #: what f keeps, as it is

    @property
    def recomputed_flops(self) -> int:
        return self.cost.flops - self.without.flops

    @property
    def advice(self) -> list[str]:
        """What to do, in sentences."""
        if not self.sites:
            return ["It calls no remat or checkpoint. Put remat around its parts: blocks, layers, steps."]
        return [site.advice for site in self.sites if site.advice]

    def __str__(self) -> str:
        costs = {"as it is": self.cost}
        for site in self.sites:
            times = "once" if site.calls == 1 else f"{site.calls} times"
            costs[f"without {site.name}, called {times}"] = site.without
        if len(self.sites) > 1:
            costs["without any"] = self.without
        width = max(map(len, costs))
        lines = [f"{'':{width}}{'kept':>12}{'peak':>12}{'FLOPs':>9}{'recomputed':>12}"]
        for name, cost in costs.items():
            kept, peak = in_units(cost.kept_bytes, BYTES), in_units(cost.peak_bytes, BYTES)
            flops, again = in_units(cost.flops), in_units(cost.flops - self.without.flops)
            lines.append(f"{name:{width}}{kept:>12}{peak:>12}{flops:>9}{again:>12}")
        return "\n".join([*lines, *self.advice])


BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
PREFIXES = {"T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3, "": 1}


def unit_for(n: int, units: dict[str, int]) -> tuple[str, int]:
    """The largest unit that is not larger than `n`, and its size."""
    return next((unit, size) for unit, size in units.items() if n >= size or size == 1)


def in_units(n: int, units: dict[str, int] = PREFIXES) -> str:
    unit, size = unit_for(n, units)
    return f"{n / size:.{min(1, size - 1)}f} {unit}".rstrip()


def explain(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Measure what each checkpoint in a function saves and costs: bytes kept, peak bytes and FLOPs.

    f is a function with checkpoints in it: `remat`, `checkpoint`, modules of :mod:`funcckpt.nn`. It is called
    several times with `args` and `kwargs`. If f takes no derivative itself, its backward runs, too
    (:func:`~funcckpt.saved_residuals` says what is differentiated). Print the result: a table, and advice for
    each checkpoint that cannot help, since it wraps the whole function or its last part, or keeps as much as
    it frees.

    >>> import torch
    >>> from funcckpt import explain, remat
    >>> def loss(w, x):
    ...     return torch.tanh(x @ w).exp().sum()
    >>> w, x = torch.ones(64, 64), torch.ones(100, 64)
    >>> found = explain(torch.func.grad(remat(loss)), w, x)
    >>> found.recomputed_flops == 2 * 100 * 64 * 64
    True
    >>> found.advice[0].split(":")[0]
    'remat(loss) is the whole function'
    """
    subject, as_is = Subject(f, args, kwargs), Calls()
    cost, residuals = measure(subject, as_is)
    without, _ = measure(subject, Calls(lambda key, i: True))

    def costs(site: _Key, call: int | None = None) -> Cost:
        """The cost of f if one function, or one of its calls, is not checkpointed."""
        return measure(subject, Calls(lambda key, i: key == site and call in (None, i)))[0]

    sites = []
    for site, calls in as_is.of.items():
        alone = costs(site)
        advice = _advice(site[0], calls, len(as_is.of) == 1, cost, alone)
        if not advice and calls > 1 and site == [*as_is.of][-1]:
            other = costs(site, calls - 1)
            if other.peak_bytes <= cost.peak_bytes and other.flops < cost.flops:
                advice = (
                    f"The last of the {calls} calls of {site[0]} is recomputed at once. Make this call "
                    f"without a checkpoint: that saves {in_units(cost.flops - other.flops)} FLOPs."
                )
        sites.append(Site(site[0], calls, alone, cost.flops - alone.flops, advice))
    return Explanation(cost, without, tuple(sites), residuals)


def _advice(title: str, calls: int, is_only: bool, cost: Cost, alone: Cost) -> str:
    """What to do about a checkpoint that does not lower the peak."""
    if is_only and calls == 1 and cost.kept_bytes == 0:
        return (
            f"{title} is the whole function: all of it is recomputed before its backward begins, and is then "
            "alive at once. Put remat around its parts: blocks, layers, steps."
        )
    if cost.peak_bytes < alone.peak_bytes:
        return ""
    saved = cost.flops - alone.flops
    wasted = "Call it without a checkpoint" + (f": that saves {in_units(saved)} FLOPs." if saved else ".")
    if cost.kept_bytes >= alone.kept_bytes:
        return f"{title} keeps no less than without a checkpoint: its inputs are as large. {wasted}"
    return f"{title} keeps less, but the peak is no lower: it is the last part, or too large. {wasted}"


class Calls:
    """Counts the calls of each checkpointed function in a forward, and decides how they are made.

    Call i of a function has no checkpoint if ``is_off(key, i)``; i is -1 in a recomputation. The other calls
    have `policy`.
    """

    def __init__(self, is_off: Callable[..., bool] = lambda key, i: False, policy: Any = AS_IT_IS) -> None:
        self.of: dict[_Key, int] = {}
        self._is_off = is_off
        self._policy = policy

    def __call__(self, f: Any, title: str) -> Any:
        if patched.is_active() and "<locals>" in title:  # a library made it for torch's checkpoint
            blocks = [node.cls for node in Found(f).nodes.values() if node.kind is kinds.MODULE]
            title = f"{title[:-1]} of {blocks[0].__name__})" if blocks else title
        key = title, code_of(f)
        i = -1
        if autograd.graph_task() == -1:
            i = self.of.pop(key, 0)
            self.of[key] = i + 1  # the last function called is last in the dict
        return WITHOUT if self._is_off(key, i) else self._policy


def measure(subject: Subject, calls: Calls, meter: Meter | None = None) -> tuple[Cost, list[Residual]]:
    """The cost of f and its backward, with the checkpoints that `calls` decides, and what f keeps."""
    context = copy_context()
    context.run(decides.set, calls)
    with meter or Meter() as meter:
        residuals = context.run(subject.run)
    kept = sum(r.bytes for r in residuals if r.kind == "output")
    return Cost(kept, meter.peak_bytes, meter.flops), residuals
