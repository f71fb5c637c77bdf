"""Peak live bytes of per-sample gradients against depth, with remat and without.

``python notebooks/memory_vs_depth.py`` prints the numbers and draws ``memory_vs_depth.png`` beside
itself (``pip install ".[plot]"``). The model is the one of ``python -m funcckpt``.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.func import grad, vmap

from funcckpt import remat
from funcckpt.__main__ import own_sources
from funcckpt.demo.language_model import Block, Shape, init, loss_with, sample
from funcckpt.meter import Measurement, measure

DEPTHS = [2, 4, 8, 12, 16, 24, 32]
BATCH, WIDTH, HEADS, CONTEXT = 8, 64, 4, 128
INK, MUTED, BLUE, ORANGE = "#1f2328", "#656d76", "#0969da", "#bc4c00"


def per_sample_gradients(depth: int, wrap: Callable[[Block], Block]) -> Measurement:
    generator = torch.Generator().manual_seed(0)
    parameters = init(Shape(depth, WIDTH, HEADS, CONTEXT), generator=generator)
    inputs, targets = sample(own_sources(), batch=BATCH, context=CONTEXT, generator=generator)
    return measure(vmap(grad(loss_with(wrap)), (None, 0, 0)), parameters, inputs, targets)


def main() -> None:
    plain, rematted, gradients = [], [], []
    print(f"{'layers':>8}{'plain':>12}{'remat':>12}{'gradients':>12}   MiB")
    for depth in DEPTHS:
        plain.append(per_sample_gradients(depth, lambda block: block).peak_bytes / 2**20)
        m = per_sample_gradients(depth, remat)
        rematted.append(m.peak_bytes / 2**20)
        gradients.append(m.end_bytes / 2**20)
        print(f"{depth:>8}{plain[-1]:>12.1f}{rematted[-1]:>12.1f}{gradients[-1]:>12.1f}")

    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for name, values, colour, style in [
        ("vmap(grad(loss))", plain, ORANGE, "o-"),
        ("the same, blocks in remat", rematted, BLUE, "o-"),
        ("the gradients alone", gradients, MUTED, "--"),
    ]:
        axes.plot(DEPTHS, values, style, color=colour, markersize=4, linewidth=1.8, label=name)
    axes.set_xlabel("layers", color=INK)
    axes.set_ylabel("peak live MiB", color=INK)
    axes.set_xticks(DEPTHS)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=160)


if __name__ == "__main__":
    main()
