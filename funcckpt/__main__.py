"""``python -m funcckpt``: per-sample gradients of a language model, with remat and without."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from .demo.language_model import Shape
from .demo.per_sample_gradients import Cost, compare, own_sources

_SIZES = {
    "layers": (12, "transformer blocks"),
    "width": (64, "features of a position"),
    "heads": (4, "attention heads of a block"),
    "context": (128, "bytes of a sequence"),
    "batch": (8, "sequences"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m funcckpt",
        description="Per-sample gradients of a byte-level transformer language model, with the "
        "blocks recomputed by funcckpt.remat and without: bytes, FLOPs and time of both.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, (size, meaning) in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=meaning)
    parser.add_argument("--device", default="cpu", help="where to run: cpu, cuda, ...")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not divisible by --heads {options.heads}")
    text = own_sources()
    shape = Shape(options.layers, options.width, options.heads, options.context)
    report = compare(text, shape, batch=options.batch, device=options.device)
    theirs = report.torch_checkpoint
    if isinstance(theirs, Cost):
        theirs = f"peak {theirs.peak_bytes / 2**20:.1f} MiB"
    print(
        f"vmap(grad(loss)): {shape.layers} layers of width {shape.width}, {options.batch} sequences "
        f"of {shape.context} bytes from {len(text):,} bytes of text\n"
        f"{report.parameters:,} parameters, loss {report.loss:.3f} nats a byte; torch "
        f"{torch.__version__}, {options.device}, {torch.get_num_threads()} threads\n\n"
        f"{'second call':16}{'plain':>14}{'remat':>14}{'ratio':>9}"
    )
    rows = {
        "peak live bytes": ("{:.1f} MiB", 2**20),
        "saved bytes": ("{:.1f} MiB", 2**20),
        "FLOPs": ("{:.2f} G", 1e9),
        "time": ("{:.3f} s", 1),
    }
    for (name, (words, unit)), a, b in zip(rows.items(), report.plain, report.remat, strict=True):
        print(f"{name:16}{words.format(a / unit):>14}{words.format(b / unit):>14}{b / a:>9.2f}")
    print(
        f"\nof the peak, the gradients themselves: {report.gradient_bytes / 2**20:.1f} MiB\n"
        f"largest difference between the gradients: {report.max_difference:.1e} "
        f"(largest gradient: {report.max_gradient:.1e})\n"
        f"torch.utils.checkpoint on the same job:\n    {theirs}"
    )


if __name__ == "__main__":
    main()
