"""What does recomputation cost and save on a GPU?

    python tests/benchmarks/gpu.py [--toy] [--only samples]

samples   How many per-sample gradients of a model of GPT-2's size fit (a head of its own, 1024 positions), in float32,
          in bfloat16 and in float32 under autocast: ``vmap(grad(loss))``, with `remat` around each block and without.
          All at the largest batch that fits without, and the milliseconds a sample at the largest of each.
calls     One block of several widths, 512 tokens: ``.backward()`` beside torch's checkpoint, and ``vmap(grad)``.
policies  ``.backward()`` through 12 blocks of width 1024, 4,096 tokens: what keeps products, and what moves them to the
          memory of the host, beside the copies in the stream of the computation that `save_on_cpu` makes.
loops     A gradient through 512 steps of a GRU of width 1024, 64 sequences: `scan`, and carries that go to the host.

Milliseconds are a median. "busy" is the share of the time in which the GPU computes, by torch's profiler: where it is
small, the host is what takes the time. ``--toy`` is for a machine without a GPU: tiny sizes, a limit of bytes by
`funcckpt.meter` for the memory, and nothing is written.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from common import Row, as_meta, none, options_of, torch_checkpoint, write
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch_models import Transformer, TransformerBlock, cross_entropy

from funcckpt import policies, remat, scan
from funcckpt.meter import measure

Run = Callable[[], Any]
TOY_BYTES = 2 * 2**20


class Device:
    """Memory and time of one; the CPU is given a limit, so that it runs out of memory as a GPU does."""

    def __init__(self, is_gpu: bool) -> None:
        self.is_gpu, self.name = is_gpu, "cuda" if is_gpu else "cpu"

    def peak_bytes(self, run: Run) -> int:
        if not self.is_gpu:
            peak = measure(run).peak_bytes
            if peak > TOY_BYTES:
                raise torch.OutOfMemoryError(f"{peak} bytes")
            return peak
        self.clear()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def clear(self) -> None:
        """Give back what the allocator has in pieces, which may be too small for the next run."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def fits(self, run: Run) -> bool:
        try:
            return self.peak_bytes(run) > 0 < self.seconds(run)  # again, in the pieces that are left
        except torch.OutOfMemoryError:
            return False

    def seconds(self, run: Run) -> float:
        """Of one run, until the device has done it."""
        if self.is_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if self.is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def busy(self, run: Run, seconds: float) -> float | None:
        """The share of `seconds` in which the kernels of a run compute."""
        if not self.is_gpu:
            return None
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profile:
            self.seconds(run)
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [e for e in kernels if not e.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]
        return round(sum(e.device_time for e in kernels) / 1e6 / seconds, 3)

    def rows(self, problem: str, runs: dict[str, Run], rounds: int = 7) -> list[Row]:
        """All methods; times are ratios to the first."""
        times = {}
        for way, run in runs.items():
            self.clear()
            times[way] = [self.seconds(run) for _ in range(rounds + 2)]
        medians = {way: statistics.median(found[2:]) for way, found in times.items()}
        first = next(iter(medians.values()))
        return [
            {
                "problem": problem,
                "method": way,
                "peak_bytes": self.peak_bytes(run),
                "milliseconds": round(1e3 * medians[way], 3),
                "time_ratio": round(medians[way] / first, 3),
                "busy": self.busy(run, medians[way]),
            }
            for way, run in runs.items()
        ]


def largest(fits: Callable[[int], bool]) -> int:
    """The largest n that fits, if all smaller ones do; 0 if none does."""
    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


DTYPES = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast to bfloat16": (torch.float32, True),
}


class Language:
    """Per-sample gradients of a model of GPT-2's size."""

    ways: ClassVar = {"no remat": none, "remat": remat}

    def __init__(self, toy: bool, device: str, dtype: torch.dtype, casts: bool) -> None:
        self.sizes = (61, 4, 16, 2) if toy else (50_257, 12, 768, 12)  # tokens, layers, width, heads
        self.positions, self.device, self.casts = 32 if toy else 1024, device, casts
        torch.manual_seed(0)
        model = Transformer(none, *self.sizes).to(device, dtype)
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        with torch.device("meta"):  # their parameters are those above
            self.models = {way: Transformer(wrap, *self.sizes) for way, wrap in self.ways.items()}

    def job(self, way: str, batch: int) -> tuple[Any, ...]:
        """The function, and what it is given."""

        def loss(parameters, x, y):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.casts):
                outputs = functional_call(self.models[way], parameters, (x[None],))
            return cross_entropy(outputs.float(), y[None])

        tokens = torch.randint(self.sizes[0], (batch, self.positions + 1), device=self.device)
        return vmap(grad(loss), (None, 0, 0)), self.parameters, tokens[:, :-1], tokens[:, 1:]

    def run(self, way: str, batch: int) -> Run:
        gradients, *args = self.job(way, batch)
        return lambda: gradients(*args)

    def flops(self, way: str, batch: int) -> int:
        gradients, *args = self.job(way, batch)
        return measure(gradients, *pytree.tree_map(as_meta, args)).flops


def samples(toy: bool, device: Device) -> list[Row]:
    rows = []
    for name, of_dtype in DTYPES.items():
        rows += per_sample_gradients(name, Language(toy, device.name, *of_dtype), device)
    return rows


def per_sample_gradients(name: str, language: Language, device: Device) -> list[Row]:
    run = language.run
    most = {way: largest(lambda n, way=way: device.fits(run(way, n))) for way in language.ways}
    batch = max(1, min(most.values()))
    rows = device.rows(f"{name}, {batch} samples", {way: run(way, batch) for way in most}, rounds=3)
    for row in rows:
        way = row["method"]
        row["flops"], row["largest_batch"] = language.flops(way, batch), most[way]
        device.clear()
        seconds = statistics.median([device.seconds(run(way, most[way])) for _ in range(3)])
        row["milliseconds_a_sample"] = round(1e3 * seconds / most[way], 3)
    return rows


def backward(wrap: Callable, f: Callable, p: dict[str, Tensor], x: Tensor) -> Run:
    """f is given parameters and an input; both are differentiated."""
    g, leaves = wrap(f), [*p.values(), x]
    return lambda: torch.autograd.grad(g(p, x).sum(), leaves)


def per_sample(wrap: Callable, f: Callable, p: dict[str, Tensor], x: Tensor) -> Run:
    g, xs = wrap(f), x.detach()[None].repeat(4, 1, 1, 1)
    constants = {name: w.detach() for name, w in p.items()}
    gradients = vmap(grad(lambda p, x: g(p, x).sum()), (None, 0))
    return lambda: gradients(constants, xs)


def of_block(width: int, tokens: int, device: str) -> tuple[Callable, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    block = TransformerBlock(width, 4 if width < 512 else 16).to(device)
    x = torch.randn(1, tokens, width, device=device, requires_grad=True)
    parameters = dict(block.named_parameters())
    return lambda p, x: functional_call(block, p, (x,)), parameters, x


def calls(toy: bool, device: Device) -> list[Row]:
    rows = []
    for width in (8, 16) if toy else (64, 512, 2048):
        f, p, x = of_block(width, 8 if toy else 512, device.name)
        ways = {"no remat": none, "torch.utils.checkpoint": torch_checkpoint, "remat": remat}
        runs = {way: backward(wrap, f, p, x) for way, wrap in ways.items()}
        rows += device.rows(f"width {width}, backward()", runs, 3 if toy else 20)
        runs = {way: per_sample(ways[way], f, p, x) for way in ("no remat", "remat")}
        rows += device.rows(f"width {width}, vmap(grad), 4 samples", runs, 3 if toy else 20)
    return rows


def on_the_host(f: Callable) -> Callable:
    """What `torch.autograd.graph.save_on_cpu` makes of f."""

    def run(*args):
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return f(*args)

    return run


def with_policies(toy: bool, device: Device) -> list[Row]:
    layers, width, tokens = (3, 8, 8) if toy else (12, 1024, 4096)
    of_torch = partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    )
    f, p, x = of_block(width, tokens, device.name)
    ways: dict[str, Callable] = {
        "no remat": none,
        "save_on_cpu": on_the_host,
        "torch.utils.checkpoint": torch_checkpoint,
        "torch.utils.checkpoint, products kept": lambda f: partial(
            checkpoint, f, use_reentrant=False, context_fn=of_torch
        ),
        "remat": remat,
        "remat, dots_with_no_batch_dims_saveable": partial(
            remat, policy=policies.dots_with_no_batch_dims_saveable
        ),
        "remat, offload_dot_with_no_batch_dims": partial(
            remat, policy=policies.offload_dot_with_no_batch_dims()
        ),
    }

    def deep(wrap: Callable) -> Callable:
        g = wrap(f)

        def run(p, x):
            for _ in range(layers):
                x = g(p, x)
            return x

        return run

    return device.rows(
        f"{layers} blocks of width {width}",
        {way: backward(none, deep(wrap), p, x) for way, wrap in ways.items()},
    )


def loops(toy: bool, device: Device) -> list[Row]:
    steps, width, batch = (16, 8, 2) if toy else (512, 1024, 64)
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(width, width).to(device.name)
    p = {name: w.detach() for name, w in cell.named_parameters()}
    h, xs = (
        torch.zeros(batch, width, device=device.name),
        torch.randn(steps, batch, width, device=device.name),
    )

    def loss(p: dict[str, Tensor], how: dict[str, Any] | None) -> Tensor:
        step = lambda h, x: (functional_call(cell, p, (x, h)), None)
        carry = h
        if how is not None:
            return scan(step, carry, xs, **how)[0].square().mean()
        for x in xs:
            carry, _ = step(carry, x)
        return carry.square().mean()

    ways: dict[str, dict[str, Any] | None] = {
        "loop": None,
        "scan": {},
        'scan, offload="host"': {"offload": "host"},
    }
    runs = {way: lambda how=how: grad(loss)(p, how) for way, how in ways.items()}
    return device.rows(f"{steps} steps of a GRU", runs, 3)


PARTS = {"samples": samples, "calls": calls, "policies": with_policies, "loops": loops}


def print_table(rows: list[Row]) -> None:
    keys = {"peak_bytes": "MiB", "milliseconds": "ms", "time_ratio": "time", "busy": "busy"}
    keys |= {"flops": "GFLOP", "largest_batch": "largest", "milliseconds_a_sample": "ms a sample"}
    scales = {"peak_bytes": 2**20, "flops": 10**9}
    for i, row in enumerate(rows):
        if not i or row["problem"] != rows[i - 1]["problem"]:
            print(
                f"\n{row['problem']:42}" + "".join(f"{keys[k]:>12}" for k in keys if row.get(k) is not None)
            )
        cells = [f"{row[k] / scales.get(k, 1):12.2f}" for k in keys if row.get(k) is not None]
        print(f"{row['method']:42}{''.join(cells)}", flush=True)


def main(arguments: list[str] | None = None) -> list[Row]:
    only = {"choices": PARTS, "help": "one part; nothing is written without --out"}
    options = options_of(__file__, only=only).parse_args(arguments)
    device = Device(not options.toy)
    rows = []
    for name, part in PARTS.items():
        if options.only in (None, name):
            rows += (found := part(options.toy, device))
            print_table(found)
            if not options.only or options.out:
                write(__file__, {"rows": rows}, options)  # what is done by now
    return rows


if __name__ == "__main__":
    main()
