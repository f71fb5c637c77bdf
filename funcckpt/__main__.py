"""``python -m funcckpt``: per-sample gradients of a language model, with remat and without."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from .demo.language_model import Shape
from .demo.per_sample_gradients import Cost, Report, compare, own_sources


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not divisible by --heads {options.heads}")
    try:
        text = options.file.read_bytes() if options.file else own_sources()
    except OSError as error:
        parser.error(f"cannot read {options.file}: {error.strerror}")
    if len(text) <= options.context:
        name = options.file or "the default text"
        parser.error(f"{name} has {len(text)} bytes, and --context {options.context} needs one more")
    try:
        torch.empty(0, device=options.device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        parser.error(f"--device {options.device}: {str(error).splitlines()[0]}")

    report = compare(
        text,
        Shape(options.layers, options.width, options.heads, options.context),
        batch=options.batch,
        seed=options.seed,
        device=options.device,
        progress=lambda line: print(f"{line} ...", file=sys.stderr, flush=True),
    )
    print(json.dumps(asdict(report), indent=2) if options.json else _table(report))


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is not positive")
        return value

    parser = argparse.ArgumentParser(
        prog="python -m funcckpt",
        description="Per-sample gradients of a byte-level transformer language model, with the "
        "blocks recomputed by funcckpt.remat and without: bytes, FLOPs and time of both.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, help="text to learn (default: the sources of funcckpt)")
    parser.add_argument("--layers", type=positive, default=12, help="transformer blocks")
    parser.add_argument("--width", type=positive, default=64, help="features of a position")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads of a block")
    parser.add_argument("--context", type=positive, default=128, help="bytes of a sequence")
    parser.add_argument("--batch", type=positive, default=8, help="sequences")
    parser.add_argument("--device", default="cpu", help="where to run: cpu, cuda, ...")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batch")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _table(report: Report) -> str:
    plain, remat = report.plain, report.remat
    rows = [
        ("peak live bytes", "{:.1f} MiB", 2**20, plain.peak_bytes, remat.peak_bytes),
        ("saved bytes", "{:.1f} MiB", 2**20, plain.saved_bytes, remat.saved_bytes),
        ("FLOPs", "{:.2f} G", 1e9, plain.flops, remat.flops),
        ("time", "{:.3f} s", 1, plain.seconds, remat.seconds),
    ]
    shape, theirs = report.shape, report.torch_checkpoint
    if isinstance(theirs, Cost):
        theirs = f"peak {theirs.peak_bytes / 2**20:.1f} MiB"
    lines = [
        f"vmap(grad(loss)): {shape.layers} layers of width {shape.width}, {report.batch} sequences "
        f"of {shape.context} bytes from {report.text_bytes:,} bytes of text",
        f"{report.parameters:,} parameters, loss {report.loss:.3f} nats a byte; torch "
        f"{report.torch}, {report.device}, {report.threads} threads",
        "",
        f"{'second call':16}{'plain':>14}{'remat':>14}{'ratio':>9}",
        *(
            f"{name:16}{words.format(a / unit):>14}{words.format(b / unit):>14}{b / a:>9.2f}"
            for name, words, unit, a, b in rows
        ),
        "",
        f"of the peak, the gradients themselves: {report.gradient_bytes / 2**20:.1f} MiB",
        f"largest difference between the gradients: {report.max_difference:.1e} "
        f"(largest gradient: {report.max_gradient:.1e})",
        f"torch.utils.checkpoint on the same job:\n    {theirs}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
