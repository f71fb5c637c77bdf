"""MAML: memory and time of the meta-gradient against the number of inner steps.

    python tests/benchmarks/maml.py [--steps 5 20 100 500]

Two problems (``pip install ".[meta,plot]"``): the regression of sinusoids of Finn et al. (2017), and telling
zeros from ones in scikit-learn's digits. The meta-parameters are the initial weights of a network and the
learning rate; an inner step is gradient descent. Compared are

* the plain unrolled loop under `torch.func.grad`;
* `scan` with √n segments, binomial, and binomial with ten carries;
* the same, and the plain loop, with `inner_grad` (mixed mode) for `torch.func.grad`;
* each inner step under `torch.utils.checkpoint`, in plain eager (it refuses `torch.func`).

Bytes are those of `funcckpt.meter`. Time is the best of three, as a ratio to the plain loop. The largest
difference of a meta-gradient from the plain loop's is printed as well, in float64. The numbers go to
``maml.json`` and ``maml.png`` in the directory that ``--out`` names, by default the current one.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.func import grad
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from funcckpt import inner_grad, scan
from funcckpt.meter import measure

F64 = torch.float64
Parameters = dict[str, torch.Tensor]
Task = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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


def sinusoid() -> tuple[Parameters, Task, Callable]:
    g = torch.Generator().manual_seed(1)
    x = torch.rand((40, 1), generator=g, dtype=F64) * 10 - 5
    y = 2.5 * torch.sin(x + 1)
    loss = lambda p, x, y: ((network(p, x) - y) ** 2).mean()
    return weights(1, 40, 1), (x[:20], y[:20], x[20:], y[20:]), loss


def digits() -> tuple[Parameters, Task, Callable]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(n_class=2, return_X_y=True)
    x, y = torch.tensor(images / 16), torch.tensor(labels)
    loss = lambda p, x, y: torch.nn.functional.cross_entropy(network(p, x), y)
    return weights(64, 32, 2), (x[:100], y[:100], x[100:200], y[100:200]), loss


def functional(gradient: Callable, options: dict | None) -> Callable:
    def adapted(meta, task, loss, steps):
        x, y, x_test, y_test = task

        def step(p, _):
            g = gradient(loss)(p, x, y)
            return {name: w - meta["rate"] * g[name] for name, w in p.items()}, None

        p = meta["p"]
        if options is None:
            for _ in range(steps):
                p, _ = step(p, None)
        else:
            p, _ = scan(step, p, length=steps, **options)
        return loss(p, x_test, y_test)

    return lambda *args: grad(adapted)(*args)


def peer(meta, task, loss, steps):
    x, y, x_test, y_test = task
    meta = pytree.tree_map(lambda t: t.clone().requires_grad_(), meta)

    def step(rate, *values):
        with torch.enable_grad():
            inner = loss(dict(zip(meta["p"], values)), x, y)
            gradients = torch.autograd.grad(inner, values, create_graph=True)
        return tuple(w - rate * g for w, g in zip(values, gradients))

    values = tuple(meta["p"].values())
    for _ in range(steps):
        values = checkpoint(step, meta["rate"], *values, use_reentrant=False)
    loss(dict(zip(meta["p"], values)), x_test, y_test).backward()
    return pytree.tree_map(lambda t: t.grad, meta)


METHODS = {
    "plain": (functional(grad, None), "#bc4c00", "o-"),
    "torch.utils.checkpoint, eager": (peer, "#656d76", "x:"),
    "sqrt": (functional(grad, {"checkpoint": "sqrt"}), "#8250df", "^-"),
    "binomial": (functional(grad, {}), "#1a7f37", "v-"),
    "checkpoints=10": (functional(grad, {"checkpoints": 10}), "#0969da", "s-"),
    "plain, mixed mode": (functional(inner_grad, None), "#bc4c00", "o--"),
    "sqrt, mixed mode": (functional(inner_grad, {"checkpoint": "sqrt"}), "#8250df", "^--"),
    "binomial, mixed mode": (functional(inner_grad, {}), "#1a7f37", "v--"),
}


def seconds(run: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def difference(a, b) -> float:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


def run(problem: Callable, steps: list[int]) -> dict[str, dict]:
    p, task, loss = problem()
    meta = {"p": p, "rate": torch.tensor(0.02, dtype=F64)}
    found: dict[str, dict] = {}
    plain = [METHODS["plain"][0](meta, task, loss, n) for n in steps]
    print(f"\n{problem.__name__:>30}" + "".join(f"{n:>10}" for n in steps) + "   KiB; time ratio; difference")
    for name, (method, _, _) in METHODS.items():
        measured = [measure(method, meta, task, loss, n) for n in steps]
        peaks = [m.peak_bytes for m in measured]
        times = [seconds(lambda n=n: method(meta, task, loss, n)) for n in steps]  # noqa: B023
        worst = max(difference(m.result, want) for m, want in zip(measured, plain))
        ratios = [t / t0 for t, t0 in zip(times, found["plain"]["seconds"] if found else times)]
        found[name] = {
            "steps": steps, "bytes": peaks, "seconds": times, "time_ratio": ratios, "difference": worst,
        }  # fmt: skip
        line = "".join(f"{b / 1024:>10.0f}" for b in peaks)
        print(f"{name:>30}{line}   {' '.join(f'{r:.2f}' for r in ratios)}   {worst:.0e}", flush=True)
    return found


def draw(found: dict[str, dict], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(found), figsize=(9.6, 4), layout="constrained", sharey=True)
    for axes, (problem, methods) in zip(all_axes, found.items()):
        for name, one in methods.items():
            _, colour, style = METHODS[name]
            kib = [b / 1024 for b in one["bytes"]]
            axes.loglog(one["steps"], kib, style, color=colour, markersize=4, linewidth=1.4, label=name)
        axes.set_title(problem, fontsize=10)
        axes.set_xlabel("inner steps")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    all_axes[0].set_ylabel("peak live KiB")
    all_axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 20, 100, 500])
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {problem.__name__: run(problem, arguments.steps) for problem in (sinusoid, digits)}
    about = {"torch": torch.__version__, "threads": 1}
    (arguments.out / "maml.json").write_text(json.dumps({"about": about, "problems": found}, indent=1) + "\n")
    draw(found, arguments.out / "maml.png")


if __name__ == "__main__":
    main()
