"""Peak live bytes of the gradient through a loop against its number of steps, for each schedule of `scan`.

``python notebooks/memory_vs_steps.py`` prints the numbers and draws ``memory_vs_steps.png`` beside itself
(``pip install ".[plot]"``). A step is a recurrent cell of width 128 for 32 sequences: its carry takes 16 KiB.
"""

import math
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.func import grad

from funcckpt import scan
from funcckpt.meter import measure

STEPS = [16, 64, 256, 1024, 4096]
SCHEDULES = {
    "checkpoint=None": ({"checkpoint": None}, "#bc4c00", "o-"),
    '"every"': ({"checkpoint": "every"}, "#9a6700", "s-"),
    '"sqrt"': ({"checkpoint": "sqrt"}, "#8250df", "^-"),
    '"binomial"': ({}, "#1a7f37", "v-"),
    '"recursive"': ({"checkpoint": "recursive"}, "#656d76", "D-"),
    '"binomial", checkpoints=10': ({"checkpoints": 10}, "#0969da", "o-"),
}
INK = "#1f2328"


def cell(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    update, new = (h @ w).chunk(2, -1)
    update = torch.sigmoid(update)
    return update * h + (1 - update) * torch.tanh(new)


def last(w: torch.Tensor, h: torch.Tensor, steps: int, options: dict) -> torch.Tensor:
    return scan(lambda h, _: (cell(h, w), None), h, length=steps, **options)[0].square().mean()


def main() -> None:
    torch.manual_seed(0)
    w, h = torch.randn(128, 256) / 128**0.5, torch.randn(32, 128)
    peaks: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    print(f"{'':>28}" + "".join(f"{n:>10}" for n in STEPS) + "  exponent")
    for name, (options, _, _) in SCHEDULES.items():
        matmuls, seconds = [], []
        for n in STEPS:
            m = measure(grad(last), w, h, n, options)
            peaks[name].append(m.peak_bytes / 2**20)
            matmuls.append(m.flops / (2 * 32 * 128 * 256) / n)
            if n <= 1024:
                start = time.perf_counter()
                grad(last)(w, h, n, options)
                seconds.append(time.perf_counter() - start)
        slope = math.log(peaks[name][-1] / peaks[name][-3]) / math.log(STEPS[-1] / STEPS[-3])
        print(f"{name:>28}" + "".join(f"{p:>10.2f}" for p in peaks[name]) + f"{slope:>10.2f}   peak MiB")
        print(f"{'':>28}" + "".join(f"{p:>10.2f}" for p in matmuls) + f"{'':>13}matrix products a step")
        print(f"{'':>28}" + "".join(f"{p:>10.3f}" for p in seconds) + f"{'':>23}seconds")

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for name, (_, colour, style) in SCHEDULES.items():
        axes.loglog(STEPS, peaks[name], style, color=colour, markersize=4, linewidth=1.6, label=name)
    axes.set_xlabel("steps", color=INK)
    axes.set_ylabel("peak live MiB", color=INK)
    axes.set_xticks(STEPS, [str(n) for n in STEPS])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=160)


if __name__ == "__main__":
    main()
