"""What a call of remat costs beside what it computes, a call of torch's checkpoint, and a naive Function.

    python tests/benchmarks/overhead.py [overhead|eager_overhead] [--only module] [--seconds 3] [--rounds 60]

Tensors are tiny, so that the time is that of the calls. All variants of a row take turns: call by call, and the time
is that which one in twenty falls below; for `eager_overhead`, which compares `checkpoint` with torch's in plain eager
code, in short rounds, of which the best counts. One thread computes; only the ratios mean something.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import Row, best_times, none, options_of, torch_checkpoint, write
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from funcckpt import checkpoint, remat
from funcckpt._torch import functorch, wrappers

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

    def parts(self):
        return self.blocks

    def forward(self, x):
        for part in self.parts():
            x = self.wrap(part)(x)
        return x


class Methods(Model):
    """What is under `wrap` refers to the whole model."""

    def parts(self):
        return [partial(self.apply_block, i) for i in range(len(self.blocks))]

    def apply_block(self, i, x):
        return self.blocks[i](x)


layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
tokens = torch.randn(1, 4, 8, requires_grad=True)


def backward(wrap, f, x):
    g = wrap(f)
    return lambda: torch.autograd.grad(g(x).sum(), x)


def with_closure(wrap):
    over = lambda w: lambda x: (x * w).sin().cos()
    return lambda: backward(wrap, over(leaf), leaf)()


def with_dict(wrap):
    g = wrap(lambda p, x: x + torch.tanh(x @ p["up"]) @ p["down"])
    p = {"up": torch.randn(8, 16, requires_grad=True), "down": torch.randn(16, 8, requires_grad=True)}
    return backward(none, lambda x: g(p, x), leaf)


def under(transform, wrap, f=tiny):
    g = wrap(f)
    return lambda: transform(lambda x: g(x).sum())(x)


samples = lambda f: lambda _: vmap(grad(f))(xs)


def of_model(wrap):
    m = Model(wrap, 4)
    parameters = dict(m.named_parameters())
    loss = lambda p, x: functional_call(m, p, (x,)).sum()
    return lambda: vmap(grad(loss), (None, 0))(parameters, xs)


def naive(f, pullback):
    """The least that torch asks of a checkpoint. It finds nothing, restores nothing and checks nothing."""

    class Naive(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return f(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            return pullback(f, *ctx.saved_tensors, cotangent)

    return Naive.apply


def in_eager(f, x, cotangent):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = f(x)
    return torch.autograd.grad(y, x, cotangent)[0]


def under_transforms(f, x, cotangent):
    return vjp(f, x)[1](cotangent)[0]


class Least(functorch.SingleLevelFunction):
    """The node of `least`."""

    @staticmethod
    def forward(ctx, f, output, x):
        ctx.f = f
        ctx.save_for_backward(x)
        return output

    @staticmethod
    def backward(ctx, cotangent):
        return None, None, at_level(partial(in_eager, ctx.f), *ctx.saved_tensors, cotangent)


def at_level(run, *tensors):
    """`run` below the active level, on what is inside of the tensors: a function of one tensor, or its pullback."""
    if (interpreter := functorch.peek_interpreter_stack()) is None:
        return run(*tensors)
    level, below = interpreter.level(), functorch.below
    if interpreter.key().value == functorch.GRAD:
        inner = wrappers.unwrapped_for_grad(tensors, level)
        return wrappers.wrapped_for_grad([below(interpreter, at_level, run, *inner)], level)[0]
    (x, *cotangents), dims = functorch.unbatched(tensors, level)
    f = run if not cotangents else run.args[0]

    def batched(x):
        (y,), _ = functorch.vmapped(lambda x: (f(x),), [x], dims[:1], len(x), "same")
        return y

    found = below(
        interpreter, at_level, partial(in_eager, batched) if cotangents else batched, x, *cotangents
    )
    return functorch.batched([found], [0], level)[0]


def least(f):
    """The least that functorch asks of a checkpoint, below its public API, for `grad` and `vmap(grad)`.

    Like `naive`, it finds nothing, restores nothing and checks nothing.
    """

    def call(x):
        output = at_level(f, x)
        functorch.set_single_level_autograd_function_allowed(True)
        try:
            return Least.apply(f, output, x)
        finally:
            functorch.set_single_level_autograd_function_allowed(False)

    return call


WRAPPERS = {"no remat": none, "torch": torch_checkpoint, "remat": remat}
METHODS = "no remat", "torch", "naive", "least", "remat"
IN_EAGER, UNDER_TRANSFORMS = ("torch", [*WRAPPERS]), ("no remat", ["no remat", "remat"])
# Rows of a function of one tensor that captures none, for which a naive Function would do.
WITH_NAIVE = dict.fromkeys(("backward", "backward, torch.sin"), in_eager)
WITH_NAIVE |= dict.fromkeys(
    ("grad", "grad, torch.sin", "vmap(grad)", "vmap(grad), torch.sin"), under_transforms
)
# name: (what the ratios are to, and all that are compared), what is called, for a wrapper.
CASES: dict[str, tuple[tuple[str, list[str]], Callable]] = {
    "backward": (IN_EAGER, lambda wrap: backward(wrap, tiny, leaf)),
    "backward, torch.sin": (IN_EAGER, lambda wrap: backward(wrap, of_torch, leaf)),
    "backward, closure": (IN_EAGER, with_closure),
    "backward, dict": (IN_EAGER, with_dict),
    "backward, module": (IN_EAGER, lambda wrap: backward(wrap, layer, tokens)),
    "backward, 16 modules": (IN_EAGER, lambda wrap: backward(none, Model(wrap, 16), leaf)),
    "backward, 16 methods": (IN_EAGER, lambda wrap: backward(none, Methods(wrap, 16), leaf)),
    "backward, 64 methods": (IN_EAGER, lambda wrap: backward(none, Methods(wrap, 64), leaf)),
    "grad": (UNDER_TRANSFORMS, lambda wrap: under(grad, wrap)),
    "grad, torch.sin": (UNDER_TRANSFORMS, lambda wrap: under(grad, wrap, of_torch)),
    "jvp": (UNDER_TRANSFORMS, lambda wrap: under(lambda f: lambda x: jvp(f, (x,), (x,)), wrap)),
    "vmap(grad)": (UNDER_TRANSFORMS, lambda wrap: under(samples, wrap)),
    "vmap(grad), torch.sin": (UNDER_TRANSFORMS, lambda wrap: under(samples, wrap, of_torch)),
    "vmap(grad), 4 modules": (UNDER_TRANSFORMS, of_model),
}


def best(runs: list[Callable], seconds: float) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds
    while not times[0] or time.perf_counter() < end:
        for run, column in zip(runs, times, strict=True):
            run()  # what the others have driven out of the caches comes back
            start = time.thread_time()  # the processor's, on a machine that others use, too
            run()
            column.append(time.thread_time() - start)
    return [sorted(column)[len(column) // 20] for column in times]


def overhead(name: str, options: Any) -> list[Row]:
    (reference, methods), case = CASES[name]
    runs = {method: case(WRAPPERS[method]) for method in methods}
    if name in WITH_NAIVE:
        runs["naive"] = case(partial(naive, pullback=WITH_NAIVE[name]))
        if WITH_NAIVE[name] is under_transforms:
            runs["least"] = case(least)
    found = best([*runs.values()], 0 if options.toy else options.seconds)
    times = dict(zip(runs, found, strict=True))
    cells = "".join([f"{times[m] * 1e6:10.1f}" if m in times else " " * 10 for m in METHODS])
    print(f"{name:24}{cells}{times['remat'] / times[reference]:8.2f}  to {reference}", flush=True)
    return [
        {"problem": name, "method": m, "seconds": t, "time_ratio": round(t / times[reference], 3)}
        for m, t in times.items()
    ]


CALLS = 40
theirs, ours = (partial(f, use_reentrant=False) for f in (checkpoint_of_torch, checkpoint))

small, image = torch.ones(4, 4, requires_grad=True), torch.ones(2, 2, 4, 4, requires_grad=True)
w = torch.ones(4, 4, requires_grad=True)
linear = nn.Linear(4, 4)
transformer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
convolution = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU())


class OwnBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


block = OwnBlock()


def ten(x):
    for _ in range(10):
        x = x.sin()
    return x


closure = lambda w: lambda x: (x * w).sin()
EAGER_CASES: dict[str, Callable[[Callable], Any]] = {
    "one operator": lambda wrap: wrap(torch.sin, small),
    "without random state": lambda wrap: wrap(torch.sin, small, preserve_rng_state=False),
    "a module": lambda wrap: wrap(linear, small),
    "a module of one's own": lambda wrap: wrap(block, small),
    "a method": lambda wrap: wrap(block.forward, small),
    "a function of a module": lambda wrap: wrap(lambda x: block(x), small),
    "an MLP": lambda wrap: wrap(mlp, small),
    "a transformer layer": lambda wrap: wrap(transformer, small),
    "batch_norm": lambda wrap: wrap(normed, small),
    "convolution, batch_norm": lambda wrap: wrap(convolution, image),
    "dropout": lambda wrap: wrap(lambda x: F.dropout(x, 0.5), small),
    "closure": lambda wrap: wrap(closure(w), small),
    "keyword argument": lambda wrap: wrap(lambda x, *, w: (x * w).sin(), small, w=small),
    "list argument": lambda wrap: wrap(lambda xs: xs[0] * xs[1], [small, small]),
    "nested": lambda wrap: wrap(lambda x: wrap(torch.sin, x.exp()).exp(), small),
    "ten operators": lambda wrap: wrap(ten, small),
}


def eager_overhead(name: str, options: Any) -> list[Row]:
    """Microseconds of a call, and of one with its backward."""
    rounds, calls = (2, 1) if options.toy else (options.rounds, CALLS)

    def run(wrap: Callable, is_backward: bool) -> None:
        for _ in range(calls):
            y = EAGER_CASES[name](wrap)
            if is_backward:
                y.backward(torch.ones_like(y))

    row: Row = {"case": name}
    cells = ""
    for column, is_backward in (("forward", False), ("forward and backward", True)):
        ways = {way: partial(run, wrap, is_backward) for way, wrap in (("torch", theirs), ("ours", ours))}
        times, _ = best_times(ways, rounds)
        found = {way: round(1e6 * time / calls, 2) for way, time in times.items()}
        row[column] = {**found, "ratio": round(times["ours"] / times["torch"], 3)}
        cells += f"{found['torch']:10.1f}{found['ours']:10.1f}{row[column]['ratio']:8.2f}"
    print(f"{name:26}{cells}", flush=True)
    return [row]


TITLE, EACH = f"{'microseconds a call':24}", "".join([f"{method:>10}" for method in METHODS])
BOTH = f"{'forward':^28}{'forward and backward':^30}\n{'':26}" + f"{'torch':>10}{'ours':>10}{'ratio':>8}" * 2
# What runs a case, all cases, and the head of the table.
BENCHMARKS: dict[str, tuple[Callable, dict[str, Any], str]] = {
    "overhead": (overhead, CASES, f"{TITLE}{EACH}   ratio"),
    "eager_overhead": (eager_overhead, EAGER_CASES, f"{TITLE}  {BOTH}"),
}


def main(arguments: list[str] | None = None) -> list[Row]:
    options = options_of(
        __file__,
        name={"nargs": "?", "choices": BENCHMARKS, "default": "overhead"},
        seconds={"type": float, "default": 3, "help": "for each row of overhead"},
        rounds={"type": int, "default": 60, "help": "of eager_overhead"},
        only={"default": "", "help": "rows whose name contains this; nothing is written"},
    ).parse_args(arguments)
    torch.set_num_threads(1)
    run, cases, head = BENCHMARKS[options.name]
    print(head)
    rows = [row for name in cases if options.only in name for row in run(name, options)]
    if not options.only:
        write(__file__, {"rows": rows}, options, options.name)
    return rows


if __name__ == "__main__":
    main()
