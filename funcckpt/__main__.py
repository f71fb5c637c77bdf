"""``python -m funcckpt``: per-sample gradients of a language model, with remat of its blocks and without."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from .meter import mark, measure
from .nn import Remat

SIZES = {"layers": 12, "width": 64, "heads": 4, "context": 128, "batch": 8}


class Block(nn.Module):
    """A transformer block: ``(context, width)`` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Spelled out: vmap has no rule for the fused attention of a CPU.
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(0, 2)
        future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        x = x + self.merge((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def torch_checkpointed(block: nn.Module) -> nn.Module:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return block


# How the blocks are wrapped, and what is shown meanwhile.
METHODS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "plain": (lambda block: block, "everything kept"),
    "remat": (Remat, "blocks in Remat"),
    "torch": (torch_checkpointed, "blocks in torch.utils.checkpoint"),
}


def own_sources() -> bytes:
    """The sources of this package: a text that every installation has."""
    return b"".join([file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))])


def job(method: str, text: bytes, device: str = "cpu", **sizes: int) -> Callable[[], dict[str, Tensor]]:
    """The job as a function: the gradient for each of `batch` sequences of `context` bytes of a text."""
    layers, width, heads, context, batch = [sizes[name] for name in SIZES]
    torch.manual_seed(0)
    blocks = [METHODS[method][0](Block(width, heads)) for _ in range(layers)]
    ends = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
    model = nn.Sequential(nn.Embedding(256, width), *blocks, *ends).to(device)
    starts = torch.randint(len(text) - context, (batch, 1))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[starts + torch.arange(context + 1)]
    sequences = windows.long().to(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], sequence: Tensor) -> Tensor:
        value = F.cross_entropy(functional_call(model, parameters, (sequence[:-1],)), sequence[1:])
        mark("saved")
        return value

    return lambda: vmap(grad(loss), (None, 0))(parameters, sequences)


def costs(run: Callable[[], Any], repeat: int = 3) -> tuple[dict[str, float], list[Tensor]]:
    """Bytes, FLOPs and seconds of a second call, and the gradients."""
    run()  # In its first call, remat learns which operators it can skip.
    m = measure(run)
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        sum([g.sum() for g in run().values()]).item()  # waits for the device
        times.append(time.perf_counter() - start)
    found = {"peak_bytes": m.peak_bytes, "saved_bytes": m.marks["saved"], "flops": m.flops}
    return {**found, "seconds": min(times)}, [*m.result.values()]


def compare(text: bytes, **sizes: Any) -> dict[str, Any]:
    """The costs of both methods, how far the gradients are apart, and what torch's checkpoint does."""
    report: dict[str, Any] = {"version": torch.__version__, "threads": torch.get_num_threads(), **sizes}
    gradients: list[list[Tensor]] = []
    for method, (_, words) in METHODS.items():
        print(f"per-sample gradients, {words} ...", file=sys.stderr, flush=True)
        try:
            report[method], found = costs(job(**sizes, method=method, text=text))
            gradients.append(found)
        except RuntimeError as error:
            report[method] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    report["gradient_bytes"] = sum([g.nbytes for g in gradients[1]])
    apart = [(a - b).abs().max().item() for a, b in zip(*gradients[:2], strict=True)]
    return {**report, "difference": max(apart)}


ROWS = [
    ("peak live bytes", "peak_bytes", "{:.1f} MiB", 2**20),
    ("saved bytes", "saved_bytes", "{:.1f} MiB", 2**20),
    ("FLOPs", "flops", "{:.2f} G", 1e9),
    ("time", "seconds", "{:.3f} s", 1),
]


def table(report: dict[str, Any]) -> str:
    lines = [
        "vmap(grad(loss)): {layers} layers of width {width}, {batch} sequences of {context} bytes\n"
        "torch {version}, {device}, {threads} threads\n".format(**report),
        f"{'second call':16}{'plain':>14}{'remat':>14}{'ratio':>9}",
    ]
    for name, key, words, unit in ROWS:
        a, b = report["plain"][key] / unit, report["remat"][key] / unit
        lines.append(f"{name:16}{words.format(a):>14}{words.format(b):>14}{b / a:>9.2f}")
    lines += [
        f"\nof the peak, the gradients take {report['gradient_bytes'] / 2**20:.1f} MiB; "
        f"largest difference: {report['difference']:.1e}",
        f"torch.utils.checkpoint on the same job:\n    {report['torch']}",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is not positive")
        return value

    parser = argparse.ArgumentParser(prog="python -m funcckpt", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="text to learn (default: the sources of funcckpt)")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, default=size, help=f"default: {size}")
    parser.add_argument("--device", default="cpu", help="such as cuda; default: cpu")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not divisible by --heads {options.heads}")
    try:
        text = options.file.read_bytes() if options.file else own_sources()
        torch.empty(0, device=options.device).cpu()
    except OSError as error:
        parser.error(f"cannot read {options.file}: {error.strerror}")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        parser.error(f"--device {options.device}: {str(error).splitlines()[0]}")
    if len(text) <= options.context:
        parser.error(f"the text has {len(text)} bytes, and --context {options.context} needs one more")
    report = compare(text, **{name: getattr(options, name) for name in (*SIZES, "device")})
    print(json.dumps(report, indent=2) if options.json else table(report))


if __name__ == "__main__":
    main()
