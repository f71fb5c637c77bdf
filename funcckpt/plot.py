"""What is kept, as a picture. Needs matplotlib: ``pip install "funcckpt[plot]"``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _torch
from .errors import InputError, OptionError
from .explain import BYTES, PREFIXES, Calls, measure, unit_for
from .meter import Meter
from .residuals import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]

__all__ = ["plot_memory", "plot_tradeoff"]

# Read on white and on black alike, and told apart by those who do not see red and green.
_COLOURS = ("#e07b39", "#3d8fd9", "#2ba58b", "#b06fd0", "#c9a227", "#8a939c")


def plot_memory(
    f: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    /,
    *args: Any,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw the bytes that are alive after each operator of forward and backward.

    Parameters
    ----------
    f : callable, or mapping of str to callable
        A function, or variants of it by name. One function that has checkpoints in it is drawn with them
        and without. A function that takes no derivative itself is drawn with its backward.
    *args, **kwargs
        What to call each with; tensors of any shape in any pytree.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        With a line for each variant, its peak marked, and a dot where its backward begins.

    Raises
    ------
    OptionError
        matplotlib is not installed.
    InputError
        f is neither a function nor a mapping of names to functions.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import remat
    >>> from funcckpt.plot import plot_memory
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = remat(lambda w, x: torch.tanh(torch.tanh(x @ w)))(w, x)
    ...     return x.sum()
    >>> ax = plot_memory(loss, [torch.eye(64)] * 4, torch.ones(256, 64))
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['loss, without remat: 576 KiB', 'loss: 400 KiB']
    """
    ax = ax or _new_axes("plot_memory")
    if callable(f):
        name = getattr(f, "__name__", type(f).__name__)
        variants: Mapping[str, Any] = {name: f}
    elif isinstance(f, Mapping) and all(callable(g) for g in f.values()):
        variants = f
    else:
        raise InputError(f"plot_memory takes a function or a dict of functions, not {type(f).__name__}.")
    lines = []
    for name, g in variants.items():
        subject = Subject(g, args, kwargs)
        calls = Calls()
        lines.append((name, _timeline(subject, calls)))
        if callable(f) and calls.of:
            lines.insert(0, (f"{name}, without remat", _timeline(subject, Calls(lambda site, i: True))))
    unit, size = unit_for(max(max(line.alive, default=0) for _, line in lines), BYTES, 2)
    for i, (name, line) in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        alive = [n / size for n in line.alive]
        peak = max(alive, default=0.0)
        ax.plot(alive, color=colour, linewidth=1.6, label=f"{name}: {peak:.3g} {unit or 'bytes'}")
        if alive:
            ax.plot(alive.index(peak), peak, "v", color=colour, markersize=6)
        if line.begin:
            ax.plot(line.begin - 1, alive[line.begin - 1], "o", color=colour, markersize=5)
    ax.set_xlabel("operators, forward (up to the dot) and backward")
    ax.set_ylabel(f"live {unit or 'bytes'}")
    _finish(ax)
    return ax


def plot_tradeoff(
    f: Callable[..., Any],
    /,
    *args: Any,
    policies: Sequence[Any] | Mapping[str, Any],
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw what each policy recomputes against the most bytes that are alive, and the Pareto front.

    Parameters
    ----------
    f : callable
        A function with checkpoints in it (`remat`, `checkpoint`, modules of :mod:`funcckpt.nn`), which are
        all given each policy in turn. A function that takes no derivative itself is measured with its
        backward.
    *args, **kwargs
        What to call it with; tensors of any shape in any pytree.
    policies : sequence, or mapping of names
        What `policy` takes; None keeps the inputs alone. Those that none beats in both respects are
        joined by a line.
    ax : matplotlib.axes.Axes, optional
        Where to draw; by default axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        With a point for each policy, and one for f with nothing checkpointed.

    Raises
    ------
    OptionError
        matplotlib is not installed.
    InputError
        There is no checkpoint in f.

    Examples
    --------
    >>> import torch
    >>> from funcckpt import checkpoint
    >>> from funcckpt.plot import plot_tradeoff
    >>> def loss(w, x):
    ...     for _ in range(4):
    ...         x = checkpoint(lambda x: torch.tanh(x @ w).exp().log(), x)
    ...     return x.sum()
    >>> keep_products = [torch.ops.aten.mm.default]
    >>> policies = {"nothing": None, "products": keep_products}
    >>> ax = plot_tradeoff(loss, torch.eye(64), torch.ones(256, 64), policies=policies)
    >>> [text.get_text() for text in ax.texts]
    ['no remat', 'nothing', 'products']
    """
    ax = ax or _new_axes("plot_tradeoff")
    subject = Subject(f, args, kwargs)
    plain = Calls(lambda site, i: True)
    without, _ = measure(subject, plain)
    if not plain.of:
        raise InputError(
            f"plot_tradeoff: there is no checkpoint in {getattr(f, '__name__', type(f).__name__)} to which a "
            "policy could be given. Put remat around its parts."
        )
    named = policies if isinstance(policies, Mapping) else {_name(policy): policy for policy in policies}
    costs = {"no remat": without}
    for name, policy in named.items():
        costs[name], _ = measure(subject, Calls(policy=policy))
    unit, size = unit_for(max(cost.peak_bytes for cost in costs.values()), BYTES, 2)
    most = max(cost.flops for cost in costs.values()) - without.flops
    prefix, million = unit_for(most, PREFIXES, 2)
    points = {
        name: ((cost.flops - without.flops) / million, cost.peak_bytes / size) for name, cost in costs.items()
    }
    front = pareto_front(points)
    ax.plot(*zip(*[points[name] for name in front], strict=True), color=_COLOURS[1], linewidth=1.2, alpha=0.7)
    for name, point in points.items():
        ax.plot(
            *point,
            "o",
            color=_COLOURS[1],
            markersize=7,
            markerfacecolor=_COLOURS[1] if name in front else "none",
        )
        crowded = any(_is_just_above(point, other, points) for other in points.values())
        offset, side = ((-7, -3), "right") if crowded else ((7, 3), "left")
        ax.annotate(name, point, offset, textcoords="offset points", fontsize=9, ha=side)
    ax.plot([], [], "o-", color=_COLOURS[1], label="Pareto front")
    ax.margins(x=0.25, y=0.12)
    ax.set_xlabel(f"recomputed {prefix}FLOPs")
    ax.set_ylabel(f"peak live {unit or 'bytes'}")
    _finish(ax)
    return ax


def pareto_front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names of those points that no other is better than in one respect and as good as in the other.

    >>> from funcckpt.plot import pareto_front
    >>> pareto_front({"a": (0, 3), "b": (1, 3), "c": (2, 1)})
    ['a', 'c']
    """
    best = float("inf")
    front = []
    for name, (_, y) in sorted(points.items(), key=lambda item: item[1]):
        if y < best:
            best = y
            front.append(name)
    return front


class _Timeline(Meter):
    """A meter that remembers what was alive after each operator, and where the backward began."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[int] = []
        self.begin = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.begin and _torch.graph_task() != -1:
            self.begin = len(self.alive)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented:
            self.alive.append(self._live_bytes)
        return out


def _timeline(subject: Subject, calls: Calls) -> _Timeline:
    timeline = _Timeline()
    measure(subject, calls, timeline)
    return timeline


def _name(policy: Any) -> str:
    return str(getattr(policy, "__name__", policy))


def _is_just_above(
    point: tuple[float, float], other: tuple[float, float], points: Mapping[str, tuple[float, float]]
) -> bool:
    """Whether the label of `other` would be drawn over that of `point`."""
    width, height = (max(p[i] for p in points.values()) for i in (0, 1))
    return abs(other[0] - point[0]) <= 0.2 * width and 0 < other[1] - point[1] < 0.07 * height


def _new_axes(name: str) -> Any:
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise OptionError(f"{name} needs matplotlib: pip install 'funcckpt[plot]'") from error
    return pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")[1]


def _finish(ax: Any) -> None:
    """What all plots share. Ink and background are those of the reader's style, light or dark."""
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", linewidth=0.5, alpha=0.4)
    ax.set_axisbelow(True)
    ax.legend(frameon=False)
