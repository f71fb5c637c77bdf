"""Pictures: live bytes over time, and peak bytes against recomputation.

Text and axes have the colours of the reader's style, light or dark. The colours of the lines can be seen on
both, also by people who cannot tell red from green.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from .._torch import autograd
from ..errors import InputError, OptionError
from ..meter import Meter
from ..policies.budget import pareto
from ..policies.policies import names_of
from .explain import BYTES, PREFIXES, Calls, measure, unit_for
from .residuals import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]

_BLUE = "#3d8fd9"
_COLOURS = ("#e07b39", _BLUE, "#2ba58b", "#b06fd0", "#c9a227", "#8a939c")


def plot_memory(
    f: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    /,
    *args: Any,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw the bytes that are alive after each operator of the forward and the backward.

    f is a function, or a mapping from names to functions; `args` and `kwargs` are as for
    :func:`~funcckpt.explain`. A single function with checkpoints is drawn with them and without. Each
    function gets a line, with a triangle at its peak and a dot where its backward begins. Draws into `ax`, or
    a new figure; returns the axes. Without matplotlib it raises an OptionError.

    >>> import torch
    >>> from funcckpt import plot_memory, remat
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = remat(lambda w, x: torch.tanh(torch.tanh(x @ w)))(w, x)
    ...     return x.sum()
    >>> ax = plot_memory(loss, [torch.eye(64)] * 4, torch.ones(256, 64))
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['loss, without remat: 576 KiB', 'loss: 400 KiB']
    """
    pyplot = _pyplot("plot_memory")
    variants = f if isinstance(f, Mapping) else {getattr(f, "__name__", type(f).__name__): f}
    if not variants:
        raise InputError("plot_memory: the mapping is empty. Pass a function, or a dict of functions.")
    lines = {}
    for name, g in variants.items():
        subject, calls = Subject(g, args, kwargs), Calls()
        line = _Timeline(subject, calls)
        if g is f and calls.of:
            lines[f"{name}, without remat"] = _Timeline(subject, Calls(lambda key, i: True))
        lines[name] = line
    if not all([line.alive for line in lines.values()]):
        raise InputError("plot_memory: f runs no operator. (A generator function runs when it is iterated.)")
    ax = ax or _new_axes(pyplot)
    unit, size = unit_for(max(line.peak_bytes for line in lines.values()), BYTES)
    for (name, line), colour in zip(lines.items(), cycle(_COLOURS), strict=False):
        alive, peak = [n / size for n in line.alive], line.peak_bytes / size
        ax.plot(alive, color=colour, linewidth=1.6, label=f"{name}: {peak:.3g} {unit}")
        ax.plot(alive.index(peak), peak, "v", color=colour, markersize=6)
        if line.begin:
            ax.plot(line.begin - 1, alive[line.begin - 1], "o", color=colour, markersize=5)
    return _finished(ax, "operators, forward (up to the dot) and backward", f"live {unit}")


def plot_tradeoff(
    f: Callable[..., Any],
    /,
    *args: Any,
    policies: Sequence[Any] | Mapping[str, Any],
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw the recomputed FLOPs and the peak bytes for each of several policies, and the Pareto front.

    f, `args` and `kwargs` are as for :func:`~funcckpt.explain`. `policies` is a sequence, or a mapping from
    names. All checkpoints in f get each policy in turn, and no policy; one more point is f without any
    checkpoint. The line is the Pareto front: the points that no other beats in both respects. Draws into
    `ax`, or a new figure; returns the axes. If f has no checkpoint, it raises an InputError.

    >>> import torch
    >>> from funcckpt import checkpoint, plot_tradeoff
    >>> def loss(w, x):
    ...     for _ in range(4):
    ...         x = checkpoint(lambda x: torch.tanh(x @ w).exp().log(), x)
    ...     return x.sum()
    >>> policies = {"products": [torch.ops.aten.mm.default]}
    >>> ax = plot_tradeoff(loss, torch.eye(64), torch.ones(256, 64), policies=policies)
    >>> [text.get_text() for text in ax.texts]
    ['no remat', 'no policy', 'products']
    """
    pyplot = _pyplot("plot_tradeoff")
    if not isinstance(policies, Iterable):
        raise OptionError("plot_tradeoff: policies= is a sequence or a mapping. Pass [policy].")
    subject = Subject(f, args, kwargs)
    plain = Calls(lambda key, i: True)
    without, _ = measure(subject, plain)
    if not plain.of:
        raise InputError("plot_tradeoff: there is no checkpoint in f. Put remat around its parts.")
    if not isinstance(policies, Mapping):
        policies = [*policies]
        policies = dict(zip(names_of("plot_tradeoff", policies), policies, strict=True))
    if None not in policies.values():
        policies = {"no policy": None} | {**policies}
    costs = {"no remat": without}
    costs |= {name: measure(subject, Calls(policy=policy))[0] for name, policy in policies.items()}
    unit, size = unit_for(max(cost.peak_bytes for cost in costs.values()), BYTES)
    again = {name: cost.flops - without.flops for name, cost in costs.items()}
    prefix, count = unit_for(max(again.values()), PREFIXES)
    points = {name: (again[name] / count, cost.peak_bytes / size) for name, cost in costs.items()}
    front = pareto(points, points.__getitem__)
    ax = ax or _new_axes(pyplot)
    best = zip(*[points[name] for name in front], strict=True)
    ax.plot(*best, color=_BLUE, linewidth=1.2, alpha=0.7, label="Pareto front")
    # Labels alternate between left and right, so that neighbours do not overlap.
    left = sorted(points, key=lambda name: points[name][1])[-2::-2]
    for name, point in points.items():
        ax.plot(*point, "o", color=_BLUE, fillstyle="full" if name in front else "none")
        offset, side = ((-7, -3), "right") if name in left else ((7, 3), "left")
        ax.annotate(name, point, offset, textcoords="offset points", fontsize=9, ha=side)
    ax.margins(x=0.25, y=0.12)
    return _finished(ax, f"recomputed {prefix}FLOPs", f"peak live {unit}")


class _Timeline(Meter):
    """Records the bytes alive after each operator of a run, and where the backward begins."""

    def __init__(self, subject: Subject, calls: Calls) -> None:
        super().__init__()
        self.alive: list[int] = []
        self.begin = 0
        measure(subject, calls, self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.begin and autograd.graph_task() != -1:
            self.begin = len(self.alive)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented:
            self.alive.append(self._live_bytes)
        return out


def _pyplot(name: str) -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise OptionError(f"{name} needs matplotlib: pip install matplotlib") from error


def _new_axes(pyplot: Any) -> Any:
    return pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")[1]


def _finished(ax: Any, x: str, y: str) -> Any:
    ax.set(xlabel=x, ylabel=y)
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", linewidth=0.5, alpha=0.4)
    ax.set_axisbelow(True)
    ax.legend(frameon=False)
    return ax
