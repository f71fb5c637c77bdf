"""What a call of checkpoint costs in plain eager code beside what it computes, ours and torch's.

    python tests/benchmarks/eager_overhead.py [--only module] [--rounds 60]

Tensors are tiny, so that the time is that of the calls: of this process, whoever else is at work. Ours and
torch's take turns, and the best of many short rounds of each counts; only the ratios mean something.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import best_times, write
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from funcckpt import checkpoint

CALLS = 40
theirs, ours = (functools.partial(f, use_reentrant=False) for f in (torch_checkpoint, checkpoint))

x, image = torch.ones(4, 4, requires_grad=True), torch.ones(2, 2, 4, 4, requires_grad=True)
w = torch.ones(4, 4, requires_grad=True)
layer = nn.Linear(4, 4)
transformer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
convolution = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


block = Block()


def ten(x):
    for _ in range(10):
        x = x.sin()
    return x


def closure(w):
    return lambda x: (x * w).sin()


def nested(wrap):
    return lambda x: wrap(torch.sin, x.exp()).exp()


CASES: dict[str, Callable[[Callable], Any]] = {
    "one operator": lambda wrap: wrap(torch.sin, x),
    "without random state": lambda wrap: wrap(torch.sin, x, preserve_rng_state=False),
    "a module": lambda wrap: wrap(layer, x),
    "a module of one's own": lambda wrap: wrap(block, x),
    "a method": lambda wrap: wrap(block.forward, x),
    "a function of a module": lambda wrap: wrap(lambda x: block(x), x),
    "an MLP": lambda wrap: wrap(mlp, x),
    "a transformer layer": lambda wrap: wrap(transformer, x),
    "batch_norm": lambda wrap: wrap(normed, x),
    "convolution, batch_norm": lambda wrap: wrap(convolution, image),
    "dropout": lambda wrap: wrap(lambda x: F.dropout(x, 0.5), x),
    "closure": lambda wrap: wrap(closure(w), x),
    "keyword argument": lambda wrap: wrap(lambda x, *, w: (x * w).sin(), x, w=x),
    "list argument": lambda wrap: wrap(lambda xs: xs[0] * xs[1], [x, x]),
    "nested": lambda wrap: wrap(nested(wrap), x),
    "ten operators": lambda wrap: wrap(ten, x),
}


def compare(name: str, rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds of a call, and of one with its backward."""
    row: dict[str, Any] = {"case": name}
    for column, is_backward in (("forward", False), ("forward and backward", True)):

        def run(wrap: Callable, is_backward: bool = is_backward) -> None:
            for _ in range(calls):
                y = CASES[name](wrap)
                if is_backward:
                    y.backward(torch.ones_like(y))

        runs = {"torch": lambda: run(theirs), "ours": lambda: run(ours)}
        times, _ = best_times(runs, rounds)
        found = {way: round(1e6 * time / calls, 2) for way, time in times.items()}
        row[column] = {**found, "ratio": round(times["ours"] / times["torch"], 3)}
    return row


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="a few calls of each; nothing is written")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", help="cases whose name contains this; nothing is written")
    parser.add_argument("--out", type=Path, help="the JSON (default: in results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'microseconds a call':26}{'forward':^28}{'forward and backward':^30}")
    print(f"{'':26}" + f"{'torch':>10}{'ours':>10}{'ratio':>8}" * 2)
    rows = []
    for name in CASES:
        if options.only and options.only not in name:
            continue
        rows.append(row := compare(name, *((2, 1) if options.toy else (options.rounds, CALLS))))
        cells = [
            f"{row[column]['torch']:10.1f}{row[column]['ours']:10.1f}{row[column]['ratio']:8.2f}"
            for column in ("forward", "forward and backward")
        ]
        print(f"{name:26}{''.join(cells)}", flush=True)
    options.toy |= options.only is not None
    write(__file__, {"rows": rows}, options)
    return rows


if __name__ == "__main__":
    main()
