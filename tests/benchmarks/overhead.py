"""What a call of remat costs beside what it computes, and a call of torch.utils.checkpoint.

    python tests/benchmarks/overhead.py [--seconds 3] [--json overhead.json]

Tensors are tiny, so that the time is that of the calls. All variants of a row take turns, call by call,
and one thread computes; only the ratios mean something.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from funcckpt import remat

x, xs = torch.randn(8), torch.randn(4, 8)
leaf = torch.randn(8, requires_grad=True)
plain, theirs = lambda f: f, lambda f: partial(checkpoint, f, use_reentrant=False)


def tiny(x):
    return x.sin().cos()


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


def under(transform, wrap):
    g = wrap(tiny)
    return lambda: transform(lambda x: g(x).sum())(x)


def model(transform, wrap, depth=4):
    m = Model(wrap, depth)
    parameters = dict(m.named_parameters())
    loss = lambda p, x: functional_call(m, p, (x,)).sum()
    return lambda: transform(loss)(parameters)


# name: (reference, thunk for a wrapper); the ratio is that of remat to the reference.
CASES: dict[str, tuple[Callable, Callable]] = {
    "backward": (theirs, lambda wrap: backward(wrap, tiny, leaf)),
    "backward, closure": (theirs, lambda wrap: lambda: backward(partial(with_closure, wrap), leaf, leaf)()),
    "backward, module": (theirs, lambda wrap: backward(wrap, layer, tokens)),
    "backward, 16 modules": (theirs, lambda wrap: backward(plain, Model(wrap, 16), leaf)),
    "backward, 16 methods": (theirs, lambda wrap: backward(plain, Methods(wrap, 16), leaf)),
    "grad": (plain, lambda wrap: under(grad, wrap)),
    "jvp": (plain, lambda wrap: under(lambda f: lambda x: jvp(f, (x,), (x,)), wrap)),
    "vmap(grad)": (plain, lambda wrap: under(lambda f: lambda _: vmap(grad(f))(xs), wrap)),
    "vmap(grad), 4 modules": (
        plain,
        lambda wrap: model(lambda f: lambda p: vmap(grad(f), (None, 0))(p, xs), wrap),
    ),
}


def best(runs: list[Callable], seconds: float) -> list[float]:
    """The time of a call of each, in turns: that which one in twenty falls below."""
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for run, column in zip(runs, times):
            run()  # what the others have driven out of the caches comes back
            start = time.thread_time()  # the processor's, on a machine that others use, too
            run()
            column.append(time.thread_time() - start)
    return [sorted(column)[len(column) // 20] for column in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3, help="for each row")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", help="a file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, 1 thread"
    print(f"{machine}; microseconds a call")
    print(f"{'':24}{'no remat':>10}{'torch':>10}{'remat':>10}{'ratio':>8}  to")
    rows = {}
    for name, (reference, case) in CASES.items():
        if arguments.only not in name:
            continue
        wrappers = (plain, remat) if reference is plain else (plain, theirs, remat)
        times = best([case(wrap) for wrap in wrappers], arguments.seconds)
        found = dict(zip(("plain", "remat") if reference is plain else ("plain", "torch", "remat"), times))
        to = "plain" if reference is plain else "torch"
        rows[name] = {**found, "ratio": found["remat"] / found[to], "to": to}
        shown = [f"{found[w] * 1e6:10.1f}" if w in found else " " * 10 for w in ("plain", "torch", "remat")]
        print(f"{name:24}{''.join(shown)}{rows[name]['ratio']:8.2f}  {to}", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine, "seconds": rows}, file, indent=1)


if __name__ == "__main__":
    main()
