"""How do the bytes of the gradient through a loop grow with its number of steps, for each schedule?

    python tests/benchmarks/loops.py

A step is h + tanh(h w), with a h of 8 by 32, which takes 1 KiB. The last problem compares times instead, for a h of
64 by 256. The FLOPs tell how often a step is run: the plain loop's are those of three products a step, and a step
that is run again adds one. Peers, where they are installed: `jax.lax.scan`, the same with `jax.checkpoint` around
its body, and Equinox's checkpointed scan. (1,024 steps in single precision magnify the rounding of a step: results
are a hundredth from those in double precision, also of the plain loop, and as far from JAX's.) The summary has the
fitted exponents of bytes against steps, through the upper half of the points. `results/loops.png` shows the bytes
(``pip install ".[plot]"``).
"""

from collections.abc import Callable
from typing import Any

import torch
from common import Job, Methods, draw_bytes, exponent, is_installed, main, of_jax, of_torch
from torch import Tensor
from torch.func import grad

from funcckpt import scan, while_loop

STEPS = [16, 128, 1024, 8192, 100_000]
TIMED = 1024


def cell(h: Tensor, w: Tensor) -> Tensor:
    return h + torch.tanh(h @ w)


def scanned(w: Tensor, h: Tensor, steps: int, **options: Any) -> Tensor:
    h, _ = scan(lambda h, _: (cell(h, w), None), h, length=steps, **options)
    return h.square().mean()


def of_a_hundred_carries(w: Tensor, h: Tensor, steps: int) -> Tensor:
    return scanned(w, h, steps, bytes=100 * h.nbytes)


def of_unknown_length(w: Tensor, h: Tensor, steps: int, **options: Any) -> Tensor:
    _, h = while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, cell(c[1], w)), (0, h), **options)
    return h.square().mean()


def in_jax(wrap: str) -> Callable:
    import jax
    import jax.numpy as jnp

    def last(w, h, steps):
        def body(h, _):
            return h + jnp.tanh(h @ w), None

        if wrap == "equinox":
            import equinox.internal

            h, _ = equinox.internal.scan(body, h, None, steps, kind="checkpointed")
        else:
            h, _ = jax.lax.scan(jax.checkpoint(body) if wrap == "checkpoint" else body, h, None, steps)
        return (h**2).mean()

    return last


OURS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "plain loop": (scanned, {"checkpoint": None}),
    'scan, "every"': (scanned, {"checkpoint": "every"}),
    'scan, "sqrt"': (scanned, {"checkpoint": "sqrt"}),
    "scan": (scanned, {}),
    'scan, "recursive"': (scanned, {"checkpoint": "recursive"}),
    "scan, checkpoints=10": (scanned, {"checkpoints": 10}),
    "scan, bytes of 100 carries": (of_a_hundred_carries, {}),
    "while_loop": (of_unknown_length, {}),
    "while_loop, checkpoints=10": (of_unknown_length, {"checkpoints": 10}),
}
PEERS = {
    "jax.lax.scan": "plain",
    "jax.lax.scan, jax.checkpoint": "checkpoint",
    "Equinox, checkpointed": "equinox",
}
# What the picture shows, and how.
DRAWN = {
    "plain loop": ("#bc4c00", "o-"),
    "jax.lax.scan, jax.checkpoint": ("#9a6700", "x:"),
    'scan, "recursive"': ("#656d76", "D-"),
    "scan": ("#1a7f37", "v-"),
    "scan, checkpoints=10": ("#0969da", "o-"),
}


def parameters(width: int, batch: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(width, width, generator=g) / width**0.5 / 10
    return w, torch.randn(batch, width, generator=g)


def loop(steps: int, is_timed: bool) -> Callable[[bool], Methods]:
    def methods(toy: bool) -> Methods:
        n = min(steps, 16) if toy else steps
        w, h = parameters(256, 64) if is_timed and not toy else parameters(32, 8)

        def ours(last: Callable, options: dict[str, Any]) -> Job:
            return of_torch(grad(lambda w, h: last(w, h, n, **options)), w, h, is_run=is_timed)

        def peer(wrap: str) -> Job:
            import jax

            last = in_jax(wrap)
            job = of_jax(
                jax.grad(lambda w, h: last(w, h, n)), *[jax.numpy.asarray(x.numpy()) for x in (w, h)]
            )
            return job if is_timed else Job(None, job.cost)

        found: Methods = {
            name: lambda last=last, options=options: ours(last, options)
            for name, (last, options) in OURS.items()
        }
        if is_installed("jax"):
            found |= {
                name: lambda wrap=wrap: peer(wrap)
                for name, wrap in PEERS.items()
                if wrap != "equinox" or is_installed("equinox")
            }
        return found

    return methods


PROBLEMS = {f"time of {TIMED:,} steps": loop(TIMED, True)} | {f"{n:,} steps": loop(n, False) for n in STEPS}


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    upper = STEPS[len(STEPS) // 2 :]
    return {name: round(exponent(upper, peaks[-len(upper) :]), 2) for name, peaks in by_method(rows).items()}


def by_method(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The bytes of each, for growing numbers of steps."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if "time" not in row["problem"]:
            found.setdefault(row["method"], []).append(row["peak_bytes"])
    return found


def draw() -> None:
    draw_bytes("loops", "steps", STEPS, {"": lambda row: "time" not in row["problem"]}, DRAWN)


if __name__ == "__main__":
    main(__file__, PROBLEMS, summary=exponents, draw=draw)
