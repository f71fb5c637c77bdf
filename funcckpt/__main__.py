"""``python -m funcckpt``: per-sample gradients of a language model, with remat of its blocks and without."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

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


def job(
    layers: int, width: int, heads: int, context: int, batch: int, *, remat: bool, device: str = "cpu"
) -> Callable[[], dict[str, Tensor]]:
    """The job as a function: the gradient for each of `batch` sequences of `context` bytes of our sources."""
    torch.manual_seed(0)
    blocks = [Block(width, heads) for _ in range(layers)]
    ends = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
    model = nn.Sequential(nn.Embedding(256, width), *(map(Remat, blocks) if remat else blocks), *ends)
    text = b"".join([file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))])
    starts = torch.randint(len(text) - context, (batch, 1))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[starts + torch.arange(context + 1)]
    sequences = windows.long().to(device)
    parameters = {name: p.detach() for name, p in model.to(device).named_parameters()}

    def loss(parameters: dict[str, Tensor], sequence: Tensor) -> Tensor:
        value = F.cross_entropy(functional_call(model, parameters, (sequence[:-1],)), sequence[1:])
        mark("saved")
        return value

    return lambda: vmap(grad(loss), (None, 0))(parameters, sequences)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m funcckpt", description=__doc__)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    parser.add_argument("--device", default="cpu", help="such as cuda; default: cpu")
    options = vars(parser.parse_args(arguments))
    found, gradients = [], []
    for remat in (False, True):
        run = job(**options, remat=remat)
        run()  # In its first call, remat learns which operators it can skip.
        m = measure(run)
        found.append((m.peak_bytes / 2**20, m.marks["saved"] / 2**20, m.flops / 1e9))
        gradients.append([*m.result.values()])
    print(
        "vmap(grad(loss)): {layers} layers of width {width}, {batch} sequences of {context} bytes; {device}, "
        "torch {torch}\n".format(**options, torch=torch.__version__)
    )
    print(f"{'second call':22}{'plain':>10}{'remat':>10}{'ratio':>9}")
    names = ("peak live bytes, MiB", "saved bytes, MiB", "FLOPs, G")
    for name, a, b in zip(names, *found, strict=True):
        print(f"{name:22}{a:>10.3g}{b:>10.3g}{b / a:>9.2f}")
    mebibytes = sum([g.nbytes for g in gradients[1]]) / 2**20
    apart = max([(a - b).abs().max().item() for a, b in zip(*gradients, strict=True)])
    print(f"\nof the peak, the gradients take {mebibytes:.1f} MiB; largest difference: {apart:.1e}")


if __name__ == "__main__":
    main()
