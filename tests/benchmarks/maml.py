"""What does a meta-gradient take, against the number of inner steps?

    python tests/benchmarks/maml.py

Two problems (``pip install ".[meta,plot]"``): the regression of sinusoids of Finn et al. (2017), and telling
zeros from ones in scikit-learn's digits. The meta-parameters are the initial weights of a network and the learning
rate; an inner step is gradient descent. Compared are the unrolled loop under `torch.func.grad`; each inner step
under `torch.utils.checkpoint`, in plain eager; `scan` with √n segments and its default; and with `inner_grad` (mixed
mode) for `torch.func.grad`. All is in float64. ``results/maml.png`` shows the bytes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from common import Methods, draw_bytes, main, of_torch, torch_checkpoint
from torch.func import grad
from torch.utils import _pytree as pytree

from funcckpt import inner_grad, scan

STEPS = [5, 50, 500]
# With larger ones the gradient through hundreds of steps is chaotic, and no two ways agree.
RATES = {"sinusoid": 0.002, "digits": 0.02}
F64 = torch.float64
Parameters = dict[str, torch.Tensor]
Task = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Problem = tuple[Parameters, Task, Callable]


def network(p: Parameters, x: torch.Tensor) -> torch.Tensor:
    h = torch.nn.functional.silu(x @ p["w1"] + p["b1"])
    return torch.nn.functional.silu(h @ p["w2"] + p["b2"]) @ p["w3"]


def weights(inputs: int, hidden: int, outputs: int) -> Parameters:
    g = torch.Generator().manual_seed(0)
    shapes = {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, hidden), "b2": (hidden,)}
    shapes["w3"] = (hidden, outputs)
    return {
        name: torch.randn(shape, generator=g, dtype=F64) / math.sqrt(shape[0])
        for name, shape in shapes.items()
    }


def sinusoid() -> Problem:
    g = torch.Generator().manual_seed(1)
    x = torch.rand((40, 1), generator=g, dtype=F64) * 10 - 5
    y = 2.5 * torch.sin(x + 1)
    loss = lambda p, x, y: ((network(p, x) - y) ** 2).mean()
    return weights(1, 40, 1), (x[:20], y[:20], x[20:], y[20:]), loss


def digits() -> Problem:
    from sklearn.datasets import load_digits

    images, labels = load_digits(n_class=2, return_X_y=True)
    x, y = torch.tensor(images / 16), torch.tensor(labels)
    loss = lambda p, x, y: torch.nn.functional.cross_entropy(network(p, x), y)
    return weights(64, 32, 2), (x[:100], y[:100], x[100:200], y[100:200]), loss


def functional(gradient: Callable, loop: Callable) -> Callable:
    def adapted(meta, task, loss, steps):
        x, y, x_test, y_test = task

        def step(p, _):
            g = gradient(loss)(p, x, y)
            return {name: w - meta["rate"] * g[name] for name, w in p.items()}, None

        return loss(loop(step, meta["p"], steps), x_test, y_test)

    return grad(adapted)


def unrolled(step: Callable, p: Parameters, steps: int) -> Parameters:
    for _ in range(steps):
        p, _ = step(p, None)
    return p


def scanned(**options: Any) -> Callable:
    return lambda step, p, steps: scan(step, p, length=steps, **options)[0]


def in_plain_eager(wrap: Callable) -> Callable:
    def gradient(meta, task, loss, steps):
        x, y, x_test, y_test = task
        meta = pytree.tree_map(lambda t: t.clone().requires_grad_(), meta)

        def step(rate, *values):
            with torch.enable_grad():
                inner = loss(dict(zip(meta["p"], values)), x, y)
                gradients = torch.autograd.grad(inner, values, create_graph=True)
            return tuple(w - rate * g for w, g in zip(values, gradients))

        values = tuple(meta["p"].values())
        for _ in range(steps):
            values = wrap(step)(meta["rate"], *values)
        loss(dict(zip(meta["p"], values)), x_test, y_test).backward()
        return pytree.tree_map(lambda t: t.grad, meta)

    return gradient


METHODS = {
    "torch.func": (functional(grad, unrolled), "#bc4c00", "o-"),
    "plain eager, torch.utils.checkpoint": (in_plain_eager(torch_checkpoint), "#656d76", "x:"),
    "scan, √n": (functional(grad, scanned(checkpoint="sqrt")), "#8250df", "^-"),
    "scan": (functional(grad, scanned()), "#1a7f37", "v-"),
    "inner_grad": (functional(inner_grad, unrolled), "#bc4c00", "o--"),
    "inner_grad, scan": (functional(inner_grad, scanned()), "#1a7f37", "v--"),
}


def maml(problem: Callable[[], Problem], steps: int) -> Callable[[bool], Methods]:
    def methods(toy: bool) -> Methods:
        p, task, loss = problem()
        meta = {"p": p, "rate": torch.tensor(RATES[problem.__name__], dtype=F64)}
        return {
            name: lambda method=method: of_torch(method, meta, task, loss, steps)
            for name, (method, _, _) in METHODS.items()
        }

    return methods


PROBLEMS = {f"{p.__name__}, {n} steps": maml(p, n) for p in (sinusoid, digits) for n in STEPS}


def draw() -> None:
    panels = {kind: lambda row, kind=kind: row["problem"].startswith(kind) for kind in ("sinusoid", "digits")}
    draw_bytes("maml", "inner steps", STEPS, panels, {name: style for name, (_, *style) in METHODS.items()})


if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=1, draw=draw)
