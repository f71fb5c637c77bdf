"""What does `remat` cost and save in compiled per-sample gradients?

    python tests/benchmarks/compiled.py

The transformer and the GRU of `per_sample.py` (4 blocks, 64 steps: to compile takes minutes), eager and under
``torch.compile(fullgraph=True)``, with `remat` and without; beside ``jax.jit`` with `jax.checkpoint` and without. A
method has a process of its own. Told are the seconds of the first call, which compiles; the processor's seconds of a
call after that, the best of some; and by how much the resident memory grows in one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from common import Row, best_times, hardware, is_installed, none, options_of, resident_growth, write
from per_sample import detached, jax_gradients, numbers, per_sample_gradients
from torch_models import GRU, Transformer

from funcckpt import remat

PROBLEMS = ("transformer", "GRU")
METHODS = {
    "eager": (none, False), "eager, remat": (remat, False),
    "compiled": (none, True), "compiled, remat": (remat, True),
}  # fmt: skip
PEERS = {"jax.jit": False, "jax.jit, jax.checkpoint": True}


def job(problem: str, method: str, toy: bool) -> Any:
    """What is called."""
    torch.manual_seed(0)
    is_gru = problem == "GRU"
    width, length = (16, 16) if toy else (64, 64 if is_gru else 128)
    layers = 2 if toy else 4
    model = lambda wrap: GRU(wrap, 256, width, 16) if is_gru else Transformer(wrap, 256, layers, width, 4)
    of_jax = lambda models, wrap: models.gru(wrap, 16) if is_gru else models.transformer(wrap, 4)
    given = detached(model(none)), numbers(256, 8, length), numbers(256, 8, length)
    if method in PEERS:
        return jax_gradients(of_jax, PEERS[method], *given).run
    wrap, is_compiled = METHODS[method]
    run = per_sample_gradients(model(wrap))
    return partial(torch.compile(run, fullgraph=True) if is_compiled else run, *given)


def measured(problem: str, method: str, toy: bool, rounds: int) -> Row:
    torch.set_num_threads(1)
    start = time.perf_counter()
    run = job(problem, method, toy)
    run()
    row = {"problem": problem, "method": method, "first_call": round(time.perf_counter() - start, 2)}
    times, _ = best_times({method: run}, rounds)
    return {**row, "seconds": times[method], "resident_bytes": resident_growth(run)}


def main(arguments: list[str] | None = None) -> list[Row]:
    options = options_of(
        __file__,
        rounds={"type": int, "default": 5, "help": "that time is the best of"},
        one={"nargs": 2, "metavar": ("PROBLEM", "METHOD"), "help": "print the row of this one alone"},
    ).parse_args(arguments)
    if options.one:
        print(json.dumps(measured(*options.one, options.toy, options.rounds)))
        return []
    rows: list[Row] = []
    print(f"{'':40}{'first call':>12}{'seconds':>12}{'resident MiB':>14}   ({hardware()})")
    for problem in PROBLEMS:
        for method in [*METHODS, *(PEERS if is_installed("jax") else ())]:
            command = [sys.executable, __file__, "--one", problem, method, "--rounds", str(options.rounds)]
            command += ["--toy"] * options.toy
            with tempfile.TemporaryDirectory() as cache:  # of its own: the first call compiles all
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(row := json.loads(done.stdout.splitlines()[-1]))
            cells = f"{row['first_call']:12.1f}{row['seconds']:12.4f}"
            resident = (row["resident_bytes"] or 0) / 2**20
            print(f"{problem + ', ' + method:40}{cells}{resident:14.1f}", flush=True)
    write(__file__, {"rows": rows}, options)
    return rows


if __name__ == "__main__":
    main()
