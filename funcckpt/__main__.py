"""``python -m funcckpt``: per-sample gradients of a language model, with remat and without."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from .demo.language_model import Block, Shape, init, loss_with, sample
from .meter import measure
from .remat import remat


class Cost(NamedTuple):
    """What one run of the job takes, after a first one."""

    peak_bytes: int  # the most that is alive at a time, the gradients included
    saved_bytes: int  # alive between the forward and the backward
    flops: int
    seconds: float  # the fastest of the repetitions, without the meter


class Report(NamedTuple):
    """Both runs, how far their gradients differ, and what torch's own checkpoint does."""

    parameters: int
    loss: float
    plain: Cost
    remat: Cost
    gradient_bytes: int
    max_gradient: float
    max_difference: float
    torch_checkpoint: Cost | str  # the error that it raises, if it does


def own_sources() -> bytes:
    """The sources of this package: a text that every installation has."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def compare(
    text: bytes,
    shape: Shape,
    *,
    batch: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    repeat: int = 3,
) -> Report:
    """Take the gradient of every sequence's loss, with each block remat'd and without."""
    generator = torch.Generator().manual_seed(0)
    parameters = init(shape, generator=generator, dtype=dtype, device=device)
    windows = sample(text, batch=batch, context=shape.context, generator=generator)
    inputs, targets = (x.to(device) for x in windows)

    def run(wrap: Callable[[Block], Block]) -> Any:
        return vmap(grad(loss_with(wrap)), (None, 0, 0))(parameters, inputs, targets)

    def cost(wrap: Callable[[Block], Block]) -> tuple[Cost, list[Tensor]]:
        run(wrap)  # In a first call remat learns which operators a backward can do without.
        m = measure(run, wrap)
        seconds = min(_seconds(partial(run, wrap), device) for _ in range(repeat))
        return Cost(m.peak_bytes, m.marks["saved"], m.flops, seconds), pytree.tree_leaves(m.result)

    plain, expected = cost(lambda block: block)
    rematted, found = cost(remat)
    try:
        theirs: Cost | str = cost(partial(partial, checkpoint, use_reentrant=False))[0]
    except RuntimeError as error:
        theirs = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Report(
        parameters=sum(p.numel() for p in pytree.tree_leaves(parameters)),
        loss=vmap(loss_with(lambda block: block), (None, 0, 0))(parameters, inputs, targets).mean().item(),
        plain=plain,
        remat=rematted,
        gradient_bytes=sum(g.nbytes for g in found),
        max_gradient=max(g.abs().max().item() for g in expected),
        max_difference=max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)),
        torch_checkpoint=theirs,
    )


def _seconds(run: Callable[[], Any], device: str) -> float:
    wait = torch.accelerator.synchronize if torch.device(device).type != "cpu" else lambda device: None
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


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
