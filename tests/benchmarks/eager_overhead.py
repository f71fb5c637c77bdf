"""What a call of checkpoint costs in plain eager code beside what it computes, ours and torch's.

    python tests/benchmarks/eager_overhead.py

Tensors are tiny, so that the time is that of the calls: of this process, whoever else is at work. Ours and
torch's take turns, and the best of several rounds of each counts; only the ratios mean something.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as theirs

from funcckpt import checkpoint as ours

ROUNDS, CALLS = 15, 200

x = torch.ones(4, 4, requires_grad=True)
layer = torch.nn.Linear(4, 4)
transformer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
normed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())


def nested(checkpoint):
    return lambda x: checkpoint(torch.sin, x.exp(), use_reentrant=False).exp()


CASES: dict[str, Callable] = {
    "one operator": lambda checkpoint: checkpoint(torch.sin, x, use_reentrant=False),
    "without random state": lambda checkpoint: checkpoint(
        torch.sin, x, use_reentrant=False, preserve_rng_state=False
    ),
    "a module": lambda checkpoint: checkpoint(layer, x, use_reentrant=False),
    "a transformer layer": lambda checkpoint: checkpoint(transformer, x, use_reentrant=False),
    "batch_norm": lambda checkpoint: checkpoint(normed, x, use_reentrant=False),
    "dropout": lambda checkpoint: checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False),
    "keyword argument": lambda checkpoint: checkpoint(
        lambda x, *, w: (x * w).sin(), x, w=x, use_reentrant=False
    ),
    "list argument": lambda checkpoint: checkpoint(lambda xs: xs[0] * xs[1], [x, x], use_reentrant=False),
    "nested": lambda checkpoint: checkpoint(nested(checkpoint), x, use_reentrant=False),
    "ten operators": lambda checkpoint: checkpoint(ten, x, use_reentrant=False),
}


def ten(x):
    for _ in range(10):
        x = x.sin()
    return x


def seconds(run: Callable) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        run()
    return (time.process_time() - start) / CALLS


def best(*runs: Callable) -> list[float]:
    for run in runs:
        run()
    rounds = [[seconds(run) for run in runs] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*rounds)]


def main() -> None:
    torch.set_num_threads(1)
    one = torch.ones(4, 4)
    print(f"torch {torch.__version__}, microseconds a call")
    print(f"{'':24}{'forward':^30}{'forward and backward':^30}")
    print(f"{'':24}" + f"{'torch':>10}{'ours':>10}{'ratio':>10}" * 2)
    for name, case in CASES.items():
        line = f"{name:24}"
        for finish in (lambda y: None, lambda y: y.backward(one)):
            a, b = best(lambda: finish(case(theirs)), lambda: finish(case(ours)))  # noqa: B023
            line += f"{a * 1e6:10.1f}{b * 1e6:10.1f}{b / a:10.2f}"
        print(line)


if __name__ == "__main__":
    main()
