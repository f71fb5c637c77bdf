"""Peak live bytes of per-sample gradients against depth, with remat and without.

``python notebooks/memory_vs_depth.py`` prints the numbers and draws ``memory_vs_depth.png`` beside
itself (``pip install ".[plot]"``). The model is the one of ``python -m funcckpt``.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from funcckpt.__main__ import SIZES, job, own_sources
from funcckpt.meter import measure

DEPTHS = [2, 4, 8, 12, 16, 24, 32]
INK, MUTED, BLUE, ORANGE = "#1f2328", "#656d76", "#0969da", "#bc4c00"


def main() -> None:
    plain, rematted, gradients, text = [], [], [], own_sources()
    print(f"{'layers':>8}{'plain':>12}{'remat':>12}{'gradients':>12}   MiB")
    for depth in DEPTHS:
        sizes = {**SIZES, "layers": depth}
        plain.append(measure(job("plain", text, **sizes)).peak_bytes / 2**20)
        m = measure(job("remat", text, **sizes))
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
