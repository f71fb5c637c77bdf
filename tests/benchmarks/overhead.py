"""What a call of remat costs beside what it computes, and a call of torch.utils.checkpoint.

    python tests/benchmarks/overhead.py

Tensors are tiny, so that the time is that of the calls. All variants of a row take turns, call by call,
and one thread computes; only the ratios mean something.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import Row, none, torch_checkpoint, write
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from funcckpt import remat

x, xs = torch.randn(8), torch.randn(4, 8)
leaf = torch.randn(8, requires_grad=True)


def tiny(x):
    return x.sin().cos()


def of_torch(x):
    """The same, as functions of a module."""
    return torch.cos(torch.sin(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Model(nn.Module):
    """Blocks under `wrap`; each is searched for what it holds, and should not lead to the others."""

    def __init__(self, wrap, depth):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        return x


class Methods(Model):
    """What is under `wrap` refers to the whole model."""

    def forward(self, x):
        for i in range(len(self.blocks)):
            x = self.wrap(partial(self.apply_block, i))(x)
        return x

    def apply_block(self, i, x):
        return self.blocks[i](x)


layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
tokens = torch.randn(1, 4, 8, requires_grad=True)


def with_closure(wrap, w):
    return wrap(lambda x: (x * w).sin().cos())


def backward(wrap, f, x):
    g = wrap(f)
    return lambda: torch.autograd.grad(g(x).sum(), x)


def under(transform, wrap, f=tiny):
    g = wrap(f)
    return lambda: transform(lambda x: g(x).sum())(x)


def model(transform, wrap, depth=4):
    m = Model(wrap, depth)
    parameters = dict(m.named_parameters())
    loss = lambda p, x: functional_call(m, p, (x,)).sum()
    return lambda: transform(loss)(parameters)


WRAPPERS = {"no remat": none, "torch": torch_checkpoint, "remat": remat}
IN_EAGER, UNDER_TRANSFORMS = ("torch", [*WRAPPERS]), ("no remat", ["no remat", "remat"])
# name: (what the ratios are to, and all that are compared), what is called, for a wrapper.
CASES: dict[str, tuple[tuple[str, list[str]], Callable]] = {
    "backward": (IN_EAGER, lambda wrap: backward(wrap, tiny, leaf)),
    "backward, torch.sin": (IN_EAGER, lambda wrap: backward(wrap, of_torch, leaf)),
    "backward, closure": (IN_EAGER, lambda wrap: lambda: backward(partial(with_closure, wrap), leaf, leaf)()),
    "backward, module": (IN_EAGER, lambda wrap: backward(wrap, layer, tokens)),
    "backward, 16 modules": (IN_EAGER, lambda wrap: backward(none, Model(wrap, 16), leaf)),
    "backward, 16 methods": (IN_EAGER, lambda wrap: backward(none, Methods(wrap, 16), leaf)),
    "grad": (UNDER_TRANSFORMS, lambda wrap: under(grad, wrap)),
    "grad, torch.sin": (UNDER_TRANSFORMS, lambda wrap: under(grad, wrap, of_torch)),
    "jvp": (UNDER_TRANSFORMS, lambda wrap: under(lambda f: lambda x: jvp(f, (x,), (x,)), wrap)),
    "vmap(grad)": (UNDER_TRANSFORMS, lambda wrap: under(lambda f: lambda _: vmap(grad(f))(xs), wrap)),
    "vmap(grad), torch.sin": (
        UNDER_TRANSFORMS,
        lambda wrap: under(lambda f: lambda _: vmap(grad(f))(xs), wrap, of_torch),
    ),
    "vmap(grad), 4 modules": (
        UNDER_TRANSFORMS,
        lambda wrap: model(lambda f: lambda p: vmap(grad(f), (None, 0))(p, xs), wrap),
    ),
}


def best(runs: list[Callable], seconds: float) -> list[float]:
    """The time of a call of each, in turns: that which one in twenty falls below."""
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < end:
        for run, column in zip(runs, times, strict=True):
            run()  # what the others have driven out of the caches comes back
            start = time.thread_time()  # the processor's, on a machine that others use, too
            run()
            column.append(time.thread_time() - start)
    return [sorted(column)[len(column) // 20] for column in times]


def compare(name: str, seconds: float) -> list[Row]:
    (reference, methods), case = CASES[name]
    times = dict(zip(methods, best([case(WRAPPERS[method]) for method in methods], seconds), strict=True))
    return [
        {"problem": name, "method": m, "seconds": t, "time_ratio": round(t / times[reference], 3)}
        for m, t in times.items()
    ]


def print_row(rows: list[Row]) -> None:
    microseconds = {row["method"]: f"{row['seconds'] * 1e6:10.1f}" for row in rows}
    cells = "".join([microseconds.get(method, " " * 10) for method in WRAPPERS])
    reference = next(row["method"] for row in rows if row["time_ratio"] == 1)
    print(f"{rows[0]['problem']:24}{cells}{rows[-1]['time_ratio']:8.2f}  to {reference}", flush=True)


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3, help="for each row")
    parser.add_argument("--only", default="", help="rows whose name contains this; nothing is written")
    parser.add_argument("--toy", action="store_true", help="one call of each; nothing is written")
    parser.add_argument("--out", type=Path, help="the JSON (default: in results)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'microseconds a call':24}" + "".join([f"{method:>10}" for method in WRAPPERS]) + "   ratio")
    rows = []
    for name in [name for name in CASES if options.only in name]:
        rows += (found := compare(name, 0 if options.toy else options.seconds))
        print_row(found)
    if not options.only:
        write(__file__, {"rows": rows}, options)
    return rows


if __name__ == "__main__":
    main()
