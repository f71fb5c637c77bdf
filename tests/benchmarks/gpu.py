"""How many per-sample gradients of a model of GPT-2's size fit on a GPU, and what does recomputation cost there?

    python tests/benchmarks/gpu.py [--toy] [--device cuda]

A head of its own and 1024 positions; ``vmap(grad(loss))`` in float32 and bfloat16, without `remat` and with `remat` around
each block. For each the largest batch that fits; the milliseconds (a median) and the allocator's peak at the largest
that fits without `remat`; and at its own the milliseconds a sample. ``--toy`` is for a machine without a GPU: a tiny
model, and a limit of bytes by `funcckpt.meter` for the memory.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import as_meta, none, options_of, write
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree
from torch_models import Transformer, cross_entropy

from funcckpt import remat
from funcckpt.meter import measure

WAYS = {"no remat": none, "remat": remat}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOY_BYTES = 2 * 2**20


class Device:
    """Memory and time of one; the CPU is given a limit, so that it runs out of memory as a GPU does."""

    def __init__(self, name: str) -> None:
        self.name, self.is_gpu = name, torch.device(name).type == "cuda"

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        if not self.is_gpu:
            peak = measure(run).peak_bytes
            if peak > TOY_BYTES:
                raise torch.OutOfMemoryError(f"{peak} bytes")
            return peak
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def milliseconds(self, run: Callable[[], Any], rounds: int = 5) -> float:
        found = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            run()
            if self.is_gpu:
                torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - start))
        return statistics.median(found[1:])

    def fits(self, run: Callable[[], Any]) -> bool:
        try:
            return self.peak_bytes(run) >= 0
        except torch.OutOfMemoryError:
            return False


def largest(fits: Callable[[int], bool]) -> int:
    """The largest n that fits, if all smaller ones do; 0 if none does."""
    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


class Problem:
    def __init__(self, toy: bool, device: str, dtype: torch.dtype) -> None:
        self.sizes = (61, 4, 16, 2) if toy else (50_257, 12, 768, 12)  # tokens, layers, width, heads
        self.positions, self.device = 32 if toy else 1024, device
        torch.manual_seed(0)
        model = Transformer(none, *self.sizes).to(device, dtype)
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        with torch.device("meta"):  # their parameters are those above
            self.models = {way: Transformer(wrap, *self.sizes) for way, wrap in WAYS.items()}

    def job(self, way: str, batch: int) -> tuple[Any, ...]:
        """The function, and what it is given."""

        def loss(parameters, x, y):
            return cross_entropy(functional_call(self.models[way], parameters, (x[None],)).float(), y[None])

        tokens = torch.randint(self.sizes[0], (batch, self.positions + 1), device=self.device)
        return vmap(grad(loss), (None, 0, 0)), self.parameters, tokens[:, :-1], tokens[:, 1:]

    def run(self, way: str, batch: int) -> Callable[[], Any]:
        def run():
            gradients, *args = self.job(way, batch)
            return gradients(*args)

        return run

    def flops(self, way: str, batch: int) -> int:
        gradients, *args = self.job(way, batch)
        return measure(gradients, *pytree.tree_map(as_meta, args)).flops


def compare(problem: Problem, device: Device, dtype: str) -> list[dict[str, Any]]:
    batches = {way: largest(lambda n, way=way: device.fits(problem.run(way, n))) for way in WAYS}
    common = max(1, batches["no remat"])
    rows = []
    for way, batch in batches.items():
        row = {"dtype": dtype, "method": way, "largest_batch": batch, "batch": common}
        if batch >= common:
            row["allocated_bytes"] = device.peak_bytes(problem.run(way, common))
            row["milliseconds"] = device.milliseconds(problem.run(way, common))
            row["flops"] = problem.flops(way, common)
            row["milliseconds_a_sample"] = device.milliseconds(problem.run(way, batch)) / batch
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{rows[0]['dtype']}: batch of {rows[0]['batch']}, and the largest that fits")
    print(f"{'':12}{'MiB':>10}{'ms':>10}{'GFLOP':>12}{'largest':>10}{'ms a sample':>14}")
    for row in rows:
        cells = "did not fit"
        if "flops" in row:
            cells = (
                f"{row['allocated_bytes'] / 2**20:10.1f}{row['milliseconds']:10.1f}{row['flops'] / 1e9:12.2f}"
                f"{row['largest_batch']:10}{row['milliseconds_a_sample']:14.1f}"
            )
        print(f"{row['method']:12}{cells}", flush=True)
    if all("flops" in row for row in rows):
        plain, ours = rows
        time, flops = [ours[key] / plain[key] for key in ("milliseconds", "flops")]
        print(f"time {time:.2f}, FLOPs {flops:.2f} of those without remat")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    options = options_of(__file__, device={"default": "cuda"}).parse_args(arguments)
    device = Device("cpu" if options.toy else options.device)
    rows = []
    for name, dtype in DTYPES.items():
        rows += (found := compare(Problem(options.toy, device.name, dtype), device, name))
        print_table(found)
    write(__file__, {"rows": rows}, options)
    return rows


if __name__ == "__main__":
    main()
