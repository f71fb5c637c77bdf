"""What the benchmarks share: jobs with their bytes, FLOPs and time, the machine in words, tables and JSON.

A benchmark names its problems, and for each the methods that solve it. Of each method it tells the most bytes alive
at a time and the FLOPs (of `funcckpt.meter`; for JAX what XLA says of the compiled program), by how much the resident
memory grows, the processor's time in one thread as a ratio to the first method's, and the largest difference from its
results, as a share of the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # before JAX is imported

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from funcckpt.meter import measure

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


@dataclass
class Job:
    """One way to solve a problem."""

    run: Callable[[], Any] | None  # None: too large to be run
    cost: Callable[[], tuple[int, int | None]]  # peak bytes, FLOPs
    is_comparable: bool = True  # whether the result is that of the first method


Methods = dict[str, Callable[[], Job]]


@dataclass
class Benchmark:
    """The methods of each problem, given whether the sizes are to be those of a toy."""

    problems: dict[str, Callable[[bool], Methods]]
    rounds: int = 3  # that time is the best of; 0 for bytes and FLOPs alone
    summary: Callable[[list[Row]], Any] = lambda rows: None  # what else is to be in the JSON
    draw: Callable[[], None] = lambda: None  # called when a JSON of record has been written


def none(f: Callable) -> Callable:
    """The wrapper that does nothing."""
    return f


def torch_checkpoint(f: Callable) -> Callable:
    return lambda *args: checkpoint(f, *args, use_reentrant=False)


def in_plain_eager(f: Callable, argnum: int = 0) -> Callable:
    """The gradient of f by plain autograd."""

    def run(*args: Any) -> torch.Tensor:
        x = args[argnum].detach().requires_grad_()
        return torch.autograd.grad(f(*args[:argnum], x, *args[argnum + 1 :]), x)[0]

    return run


def of_torch(f: Callable, *args: Any, on_meta: bool = False, is_run: bool = True, **options: Any) -> Job:
    """`f(*args)`. Its bytes and FLOPs are those of a run, or those of meta tensors that stand for `args`."""

    def cost():
        m = measure(f, *(pytree.tree_map_only(torch.Tensor, as_meta, args) if on_meta else args))
        return m.peak_bytes, m.flops

    return Job((lambda: f(*args)) if is_run else None, cost, **options)


def as_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="meta", requires_grad=x.requires_grad)


def of_jax(f: Callable, *args: Any) -> Job:
    """`f(*args)`, compiled; tensors become arrays."""
    import jax

    args = pytree.tree_map_only(torch.Tensor, lambda x: jax.numpy.asarray(x.detach().numpy()), args)
    compiled = jax.jit(f).lower(*args).compile()
    memory = compiled.memory_analysis()
    bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return Job(lambda: jax.block_until_ready(compiled(*args)), lambda: (bytes, None))


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def options_of(script: str, **more: dict[str, Any]) -> argparse.ArgumentParser:
    """What all scripts are told on the command line, and what `more` describes."""
    parser = argparse.ArgumentParser(description=f"Benchmarks of {Path(script).name}.")
    parser.add_argument("--toy", action="store_true", help="sizes that take seconds; nothing is written")
    parser.add_argument("--out", type=Path, help="the JSON (default: in results)")
    for name, how in more.items():
        parser.add_argument(name if name == "name" else f"--{name}", **how)
    return parser


def main(script: str, **benchmarks: Benchmark) -> None:
    """Run one of the benchmarks of a script."""
    which = {"nargs": "?", "choices": benchmarks, "default": Path(script).stem, "help": "which (%(default)s)"}
    parser = options_of(script, name=which, rounds={"type": int, "help": "that time is the best of"})
    options = parser.parse_args()
    benchmark = benchmarks[options.name]
    rounds = benchmark.rounds if options.rounds is None else options.rounds
    torch.set_num_threads(1)
    # What is freed goes back to the system, and is counted when it comes anew.
    call_libc("mallopt", -3, 1 << 16)  # M_MMAP_THRESHOLD
    measured = [_costs(name, of(options.toy), rounds > 0) for name, of in benchmark.problems.items()]
    call_libc("mallopt", -3, 1 << 25)
    rows: list[Row] = []
    for jobs, of_problem in measured:
        _run(jobs, of_problem, rounds)
        _print_table(list(of_problem.values()))
        rows += of_problem.values()
    write(script, {"rows": rows, "summary": benchmark.summary(rows)}, options, options.name)
    if not (options.toy or options.out):
        benchmark.draw()


def write(script: str, found: dict[str, Any], options: argparse.Namespace, name: str = "") -> None:
    """The JSON of record: what was found, with commit, machine and command."""
    name, script = name or Path(script).stem, Path(script).name
    about = {
        "commit": COMMIT,
        "command": f"python tests/benchmarks/{script}" + f" {name}" * (script != f"{name}.py"),
        "hardware": hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{m: sys.modules[m].__version__ for m in ("jax", "equinox", "opacus") if m in sys.modules},
    }
    if options.out or not options.toy:
        path = options.out or RESULTS / f"{name}.json"
        path.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=RESULTS.parent, capture_output=True, text=True
    ).stdout.strip()


# As the benchmark begins.
_CHANGED = _git("status", "--porcelain", "--", ":/funcckpt", "*.py")
COMMIT = (_git("rev-parse", "HEAD") + (" and changes" if _CHANGED else "")) or None


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpu = platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":")[1].strip() for line in info.read_text().split("\n") if "model name" in line]
        cpu = ", ".join([cpu, *names[:1]])
    return f"{cpu}, 1 of {os.cpu_count()} cores"


def compare(problem: str, methods: Methods, rounds: int) -> list[Row]:
    """A row for each method."""
    jobs, rows = _costs(problem, methods, rounds > 0)
    _run(jobs, rows, rounds)
    return list(rows.values())


def _costs(problem: str, methods: Methods, with_resident: bool) -> tuple[dict[str, Job], dict[str, Row]]:
    jobs: dict[str, Job] = {}
    rows: dict[str, Row] = {}
    for name, make in methods.items():
        print(f"{problem}: {name}", file=sys.stderr, flush=True)  # it may take minutes
        rows[name] = row = {"problem": problem, "method": name}
        try:
            job = make()
            row["peak_bytes"], row["flops"] = job.cost()
        except RuntimeError as error:  # torch refuses it
            row["error"] = str(error).split("\n")[0]
            continue
        if job.run:
            jobs[name] = job
            row["resident_bytes"] = resident_growth(job.run) if with_resident else None
    return jobs, rows


def _run(jobs: dict[str, Job], rows: dict[str, Row], rounds: int) -> None:
    if not (jobs and rounds):
        return
    times, results = best_times({name: job.run for name, job in jobs.items()}, rounds)
    first = next(iter(jobs))
    for name, job in jobs.items():
        rows[name] |= {"seconds": times[name], "time_ratio": round(times[name] / times[first], 3)}
        if job.is_comparable:
            rows[name]["difference"] = difference(results[name], results[first])


def best_times(runs: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Processor's seconds, the best of some rounds in turns, after one to warm up (if there is more than one);
    and what the runs return.
    """
    best, results = dict.fromkeys(runs, math.inf), {}
    for number in range(rounds + (rounds > 1)):
        for name, run in runs.items():
            start = time.process_time()
            results[name] = run()
            if number > 0 or rounds == 1:
                best[name] = min(best[name], time.process_time() - start)
    return best, results


def difference(found: Any, expected: Any) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    doubles = [[torch.as_tensor(x).double() for x in pair] for pair in pairs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in doubles)


def call_libc(name: str, *args: int) -> None:
    with contextlib.suppress(AttributeError):  # another C library than glibc
        getattr(ctypes.CDLL(None), name)(*args)


def resident_growth(run: Callable[[], Any]) -> int | None:
    """By how much a run makes the resident memory grow, at most; None where nothing tells."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    gc.collect()
    call_libc("malloc_trim", 0)  # what was freed and not given back would be taken again, unseen
    reset.write_text("5")  # the peak is what is there now

    def kib(key: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().split("\n") if line.startswith(key))

    before = kib("VmRSS:")
    result = run()
    grown = 1024 * (kib("VmHWM:") - before)
    del result
    return grown


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "peak MiB": ("peak_bytes", lambda n: f"{n / 2**20:.1f}"),
    "resident": ("resident_bytes", lambda n: f"{n / 2**20:.1f}"),
    "GFLOP": ("flops", lambda n: f"{n / 1e9:.3f}"),
    "time": ("time_ratio", lambda ratio: f"{ratio:.2f}"),
    "difference": ("difference", lambda d: f"{d:.0e}"),
}


def _print_table(rows: list[Row]) -> None:
    print(f"\n{rows[0]['problem']:46}" + "".join(f"{title:>12}" for title in COLUMNS))
    for row in rows:
        cells = [form(row[key]) if row.get(key) is not None else "" for key, form in COLUMNS.values()]
        said = row["error"][:100] if "error" in row else "".join(f"{cell:>12}" for cell in cells)
        print(f"{row['method']:46}{said}", flush=True)


def exponents(sizes: Sequence[float], rows: list[Row], key: str = "peak_bytes", digits: int = 2) -> dict:
    """Of each method: the slope of `key` against the last of these sizes, of least squares in logarithms."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if key in row:
            found.setdefault(row["method"], []).append(math.log(row[key]))
    x = [math.log(n) for n in sizes]
    slopes = {name: statistics.linear_regression(x, y[-len(x) :]).slope for name, y in found.items()}
    return {name: round(slope, digits) for name, slope in slopes.items()}


def draw_bytes(name: str, what: str, sizes: Sequence[int], panels: dict, styles: dict) -> None:
    """Write a picture of the peaks that are recorded, against sizes: a panel for the rows that each of `panels` takes,
    a curve for each method, whose colour and style are given.
    """
    import matplotlib.pyplot as plt

    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    size = {"figsize": (2.4 + 4 * len(panels), 4.2), "layout": "constrained"}
    figure, ((*all_axes,),) = plt.subplots(1, len(panels), sharey=True, squeeze=False, **size)
    for axes, (title, is_shown) in zip(all_axes, panels.items(), strict=True):
        for method, (colour, style) in styles.items():
            kib = [row["peak_bytes"] / 1024 for row in rows if row["method"] == method and is_shown(row)]
            if kib:
                axes.loglog(sizes, kib, style, color=colour, markersize=4, linewidth=1.4, label=method)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(what)
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    all_axes[0].set_ylabel("peak live KiB")
    all_axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(RESULTS / f"{name}.png", dpi=160)
