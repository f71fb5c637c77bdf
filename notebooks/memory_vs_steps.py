"""Peak live bytes and time of the gradient through a loop against its number of steps, for each schedule.

``python notebooks/memory_vs_steps.py`` prints the numbers, writes them to ``memory_vs_steps.json``, and
draws ``memory_vs_steps.png`` beside itself (``pip install ".[plot]"``). A step is h + tanh(h w) with a h
of 8 by 32, which takes 1 KiB. Bytes are those of `funcckpt.meter`, and exact. Time is a ratio to
the plain loop of 1024 steps, for a h of 64 by 256; the best of three, the loops taking turns.

The numbers are saved as they come; ``--add`` measures what is not in the file yet. At 100,000 steps the
schedules that run steps most often ("recursive", and those of ten checkpoints) take most of an hour each.

Peers, where they are installed: `jax.lax.scan`, the same with `jax.checkpoint` around its body, and
Equinox's checkpointed scan. Their bytes are what XLA says it allocates for temporaries, and their time a
ratio to `jax.lax.scan`.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.func import grad

from funcckpt import scan, while_loop
from funcckpt.meter import measure

STEPS = [16, 128, 1024, 8192, 100_000]
TIMED = 1024
SCHEDULES = {
    "checkpoint=None": ({"checkpoint": None}, "#bc4c00", "o-"),
    '"every"': ({"checkpoint": "every"}, "#9a6700", "s-"),
    '"sqrt"': ({"checkpoint": "sqrt"}, "#8250df", "^-"),
    '"binomial"': ({}, "#1a7f37", "v-"),
    '"recursive"': ({"checkpoint": "recursive"}, "#656d76", "D-"),
    "checkpoints=10": ({"checkpoints": 10}, "#0969da", "o-"),
    "bytes of 100 carries": ({"bytes": 100}, "#0969da", "s--"),
    "while_loop": ({"while": True}, "#1a7f37", "x--"),
    "while_loop, checkpoints=10": ({"while": True, "checkpoints": 10}, "#0969da", "x--"),
}
PEERS = {
    "jax.lax.scan": ("plain", "#bc4c00", "x:"),
    "jax.checkpoint in scan": ("checkpoint", "#9a6700", "x:"),
    "Equinox, checkpointed": ("equinox", "#1a7f37", "x:"),
}
INK = "#1f2328"


def cell(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return h + torch.tanh(h @ w)


def last(w: torch.Tensor, h: torch.Tensor, steps: int, options: dict) -> torch.Tensor:
    if "bytes" in options:
        options = {"bytes": options["bytes"] * h.nbytes}
    if "while" in options:
        options = {key: value for key, value in options.items() if key != "while"}
        going_on, body = lambda c: c[0] < steps, lambda c: (c[0] + 1, cell(c[1], w))
        h = while_loop(going_on, body, (0, h), **options)[1]
    else:
        h, _ = scan(lambda h, _: (cell(h, w), None), h, length=steps, **options)
    return h.square().mean()


def parameters(width: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(width, width, generator=g) / width**0.5 / 10
    return w, torch.randn(batch, width, generator=g)


def exponent(steps: list[int], peaks: list[float]) -> float:
    """The slope of least squares through the upper half of the points, in logarithms."""
    half = len(steps) // 2
    x, y = [math.log(n) for n in steps[half:]], [math.log(p) for p in peaks[half:]]
    if len(x) < 2:
        return math.nan
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def best_times(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The best of three each, the first runs apart."""
    best = dict.fromkeys(runs, math.inf)
    for round_ in range(4):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_ > 0:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def ours(steps: list[int], only: list[str], found: dict[str, dict], save: Callable[[], None]) -> None:
    """Measure what is not in `found` yet."""
    w, h = parameters(32, 8)
    for name in only:
        options = SCHEDULES[name][0]
        one = found.setdefault(name, {"steps": [], "bytes": [], "evaluations": []})
        for n in steps:
            if n in one["steps"]:
                continue
            m = measure(grad(last), w, h, n, options)
            one["steps"].append(n)
            one["bytes"].append(m.peak_bytes)
            # A product forward, and two backward for each step that is recorded.
            one["evaluations"].append(m.flops / (2 * 8 * 32 * 32) / n - 2)
            print(f"{name:>28}{n:>10,} steps{m.peak_bytes / 1024:>10.0f} KiB", flush=True)
            save()
    if all("time_ratio" in found[name] for name in SCHEDULES):
        return
    w, h = parameters(256, 64)
    runs = {
        name: (lambda options=options: grad(last)(w, h, TIMED, options))
        for name, (options, _, _) in SCHEDULES.items()
    }
    times = best_times(runs)
    for name, seconds in times.items():
        found[name]["time_ratio"] = seconds / times["checkpoint=None"]
    save()


def peers(steps: list[int]) -> dict[str, dict]:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return {}
    try:
        import equinox.internal as eqxi
    except ImportError:
        eqxi = None

    def jax_last(w, h, n, how):
        def body(h, _):
            return h + jnp.tanh(h @ w), None

        if how == "equinox":
            h, _ = eqxi.scan(body, h, None, n, kind="checkpointed")
        else:
            h, _ = jax.lax.scan(jax.checkpoint(body) if how == "checkpoint" else body, h, None, n)
        return (h**2).mean()

    def compiled(how, n, w, h):
        return jax.jit(lambda w, h: jax.grad(jax_last)(w, h, n, how)).lower(w, h).compile()

    found: dict[str, dict] = {}
    small = [jnp.asarray(x.numpy()) for x in parameters(32, 8)]
    large = [jnp.asarray(x.numpy()) for x in parameters(256, 64)]
    runs = {}
    for name, (how, _, _) in PEERS.items():
        if how == "equinox" and eqxi is None:
            continue
        bytes_ = [compiled(how, n, *small).memory_analysis().temp_size_in_bytes for n in steps]
        found[name] = {"steps": steps, "bytes": bytes_}
        step = compiled(how, TIMED, *large)
        runs[name] = lambda step=step: jax.block_until_ready(step(*large))
    times = best_times(runs)
    for name, seconds in times.items():
        found[name]["time_ratio"] = seconds / times["jax.lax.scan"]
    return found


def draw(found: dict[str, dict], steps: list[int], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    styles = {name: (colour, style) for name, (_, colour, style) in (SCHEDULES | PEERS).items()}
    for name, one in found.items():
        colour, style = styles[name]
        kib = [p / 1024 for p in one["bytes"]]
        label = f"{name}: n^{one['exponent']:.2f}"
        axes.loglog(one["steps"], kib, style, color=colour, markersize=4, linewidth=1.4, label=label)
    axes.set_xlabel("steps n", color=INK)
    axes.set_ylabel("peak live KiB", color=INK)
    axes.set_xticks(steps, [f"{n:,}" for n in steps])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--add", action="store_true", help="to what is in the file already")
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(__file__).with_suffix(".json")
    found = json.loads(path.read_text())["loops"] if arguments.add else {}
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1}

    def save() -> None:
        path.write_text(json.dumps({"about": about, "loops": found}, indent=1) + "\n")

    ours(arguments.steps, arguments.only, found, save)
    found |= peers(arguments.steps)
    steps = sorted({n for one in found.values() for n in one["steps"]})
    print(f"{'KiB':>28}" + "".join(f"{n:>10,}" for n in steps) + f"{'exponent':>10}{'runs':>8}{'time':>8}")
    for name, one in found.items():
        one["exponent"] = exponent(one["steps"], one["bytes"])
        runs = f"{one['evaluations'][-1]:>8.2f}" if "evaluations" in one else f"{'':>8}"
        kib = "".join(f"{b / 1024:>10.0f}" for b in one["bytes"]).ljust(10 * len(steps))
        print(f"{name:>28}{kib}{one['exponent']:>10.2f}{runs}{one['time_ratio']:>8.2f}")
    save()
    draw(found, steps, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
