"""Write the tables of the README and of the documentation from the JSON files in results.

    python tests/benchmarks/readme.py

A table stands between ``<!-- results: NAME -->`` and ``<!-- end of results -->``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def sources(*names: str) -> list[str]:
    """Where the figures come from."""
    found = [load(name)["about"] for name in names]
    (version,), (hardware,) = ({about[key] for about in found} for key in ("torch", "hardware"))
    commands = ", ".join(f"`{about['command']}`" for about in found)
    commits = ", ".join(sorted({about["commit"][:10] + about["commit"][40:] for about in found}))
    return ["", f"*{commands}: torch {version}, {hardware}, commit {commits}.*"]


def mebibytes(n: int) -> str:
    return f"{n / 2**20:,.1f}" if n < 100 * 2**20 else f"{n / 2**20:,.0f}"


def by(key: str, name: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in load(name)["rows"]:
        found.setdefault(row[key], []).append(row)
    return found


def by_problem(name: str) -> dict[str, dict[str, Row]]:
    """{problem: {method: row}}"""
    return {problem: {row["method"]: row for row in rows} for problem, rows in by("problem", name).items()}


def ratio(row: Row, to: Row, key: str = "flops") -> str:
    return f"{row[key] / to[key]:.2f}" if row[key] else ""


def grid(name: str, problems: Sequence[str] = ()) -> list[str]:
    """A table for each problem, or for those that are named: a line for each method."""
    lines = []
    for problem, rows in by("problem", name).items():
        if problems and problem not in problems:
            continue
        first, *_ = rows = [row for row in rows if "error" not in row]
        timed = ["time"] * ("time_ratio" in first)
        body = [
            [row["method"], mebibytes(row["peak_bytes"]), ratio(row, first)]
            + [f"{row['time_ratio']:.2f}" for _ in timed]
            for row in rows
        ]
        lines += [*table([problem, "peak MiB", "FLOPs", *timed], body), ""]
    return lines[:-1] + sources(name)


def costs() -> list[str]:
    """Of `remat`, in parts of what it takes without, by the width of the model."""
    body = [
        [problem, *[ratio(of["remat"], of["plain"], key) for key in ("peak_bytes", "flops", "time_ratio")]]
        for problem, of in by_problem("sizes").items()
    ]
    return table(["transformer of 6 blocks", "peak bytes", "FLOPs", "time"], body) + sources("sizes")


def issues() -> list[str]:
    link = "[{0}](https://github.com/pytorch/pytorch/issues/{0})".format
    func, eager, jax = "torch.func.grad", "torch.utils.checkpoint", "JAX, jax.checkpoint"
    sampled = ("jacrev", "", "jacrev, remat", "jacrev, scan", jax)
    lines = [
        ("functorch_grad", "cos(sin(x)), 10 times", f"`grad` of ten cos(sin(x)) ({link(134612)})",
         (func, f"torch.autograd.grad, {eager}", f"{func}, remat", "", "")),
        ("power_iteration", "10,000 steps", f"`grad` of 10,000 power iterations, 20 at a time ({link(125591)})",
         (func, f"plain eager, {eager}", f"{func}, remat", f"{func}, scan", jax)),
        *[("sampler", f"{n} steps", f"`jacrev` through a sampler of {n} steps ({link(141845)})", sampled)
          for n in (8, 512)],
    ]  # fmt: skip
    body = []
    for name, problem, title, columns in lines:
        rows = by_problem(name)[problem]
        said = {m: mebibytes(row["peak_bytes"]) if "flops" in row else "refuses" for m, row in rows.items()}
        body.append([title, *[said.get(method, "") for method in columns]])
    head = ["peak MiB", "torch.func", f"`{eager}`, plain eager", "`remat`", "`scan`", "`jax.checkpoint`"]
    return table(head, body) + sources(*dict.fromkeys(name for name, *_ in lines))


def depth() -> list[str]:
    summary, rows = load("depth")["summary"], by_problem("depth")

    def cells(kind: str, method: str) -> list[str]:
        if method not in summary[kind]:
            return [""] * 3
        ends = [mebibytes(rows[f"{n} blocks: {kind}"][method]["peak_bytes"]) for n in (4, 96)]
        return [" to ".join(ends), *[f"n^{summary[kind][method][what]:.2f}" for what in ("bytes", "time")]]

    kinds = ("`grad`", "`vmap(grad)`")
    head = ["4 to 96 blocks", *[f"{kind}: {what}" for kind in kinds for what in ("MiB", "bytes", "time")]]
    body = [[way, *cells("input", way), *cells("per sample", way)] for way in summary["input"]]
    return table(head, body) + sources("depth")


def chunks() -> list[str]:
    summary, ways = load("chunks")["summary"], ["remat", "chunk_size=2", "remat, chunk_size=2"]
    jobs = {"all gradients": "all", "clipped sum": "clipped sum"}
    head = ["activations / gradient", *[f"{said}: {way}" for said in jobs.values() for way in ways]]
    body = [
        [f"{activations / summary['gradient_bytes']:.1f}"]
        + [ratio(of[f"{job}: {way}"], of[f"{job}: neither"], "peak_bytes") for job in jobs for way in ways]
        for of, activations in zip(by_problem("chunks").values(), summary["activation_bytes"], strict=True)
    ]
    return table(head, body) + sources("chunks")


def loops() -> list[str]:
    exponents, rows = load("loops")["summary"], by("method", "loops")
    timed, shortest, *_, longest = rows["plain loop"]
    body = []
    for method, (time, short, *_, long) in rows.items():
        kib = [f"{row['peak_bytes'] / 1024:,.0f}" for row in (short, long)]
        costs = [f"n^{exponents[method]:.2f}", ratio(long, longest), f"{time['time_ratio']:.2f}"]
        body.append([method, *kib, *costs])
    long = longest["problem"]
    head = ["peak KiB", shortest["problem"], long, "bytes", f"FLOPs, {long}", timed["problem"]]
    return table(head, body) + sources("loops")


def overhead() -> list[str]:
    """Of calls of `remat`, to what each case is compared with."""
    body = [
        [
            case,
            "`torch.utils.checkpoint`" if "torch" in of else "no remat",
            *[f"{of[way]['time_ratio']:.2f}" if way in of else "" for way in ("remat", "naive", "least")],
        ]
        for case, of in by_problem("overhead").items()
    ]
    head = ["`remat`", "compared with", "time", "a naive Function", "the least"]
    return table(head, body) + sources("overhead")


def eager_overhead() -> list[str]:
    """Of calls of `checkpoint`, to torch's."""
    body = [
        [row["case"], *[f"{row[which]['ratio']:.2f}" for which in ("forward", "forward and backward")]]
        for row in load("eager_overhead")["rows"]
    ]
    head = ["`checkpoint`, compared with torch's", "forward", "forward and backward"]
    return table(head, body) + sources("eager_overhead")


def compiled() -> list[str]:
    lines = []
    for problem, rows in by("problem", "compiled").items():
        body = []
        for row in rows:
            rest = f"{(row['resident_bytes'] or 0) / 2**20:.0f}", f"{row['first_call']:.0f}"
            body.append([row["method"], ratio(row, rows[0], "seconds"), *rest])
        lines += [*table([problem, "time", "resident MiB", "first call, s"], body), ""]
    return lines[:-1] + sources("compiled")


def gpu() -> list[str]:
    """Per-sample gradients in one table, and the rest: a line for each method."""
    head = ["GPT-2's size", "largest batch", "peak GiB", "time", "FLOPs", "ms a sample, largest"]
    body, lines = [], []
    for problem, rows in by("problem", "gpu").items():
        first = rows[0]
        if "largest_batch" in first:
            for row in rows:
                costs = mebibytes(row["peak_bytes"] / 1024), f"{row['time_ratio']:.2f}", ratio(row, first)
                rest = str(row["largest_batch"]), *costs, f"{row['milliseconds_a_sample']:.1f}"
                body.append([f"{problem}: {row['method']}", *rest])
            continue
        cells = [
            [row["method"], mebibytes(row["peak_bytes"]), f"{row['time_ratio']:.2f}", f"{row['busy']:.2f}"]
            for row in rows
        ]
        lines += ["", *table([problem, "peak MiB", "time", "busy"], cells)]
    return [*table(head, body), *lines, *sources("gpu")]


def plans() -> list[str]:
    """The plans of `fit`; and how many are equal to the best of all plans of a smaller model."""
    head = ["all plans of 4 blocks", "plans", "budgets", "best plan found"]
    body = [
        [problem, *[str(found[key]) for key in ("plans", "budgets", "equal to the best")]]
        for problem, found in load("fit")["summary"].items()
    ]
    *lines, empty, source = grid("fit")
    return [*lines, "", *table(head, body), empty, source]


TABLES: dict[str, Callable[[], list[str]]] = {
    **{f.__name__: f for f in (costs, issues, depth, chunks, loops, compiled, overhead, eager_overhead, gpu)},
    **{name: partial(grid, name) for name in ("sizes", "per_sample", "bilevel")},
    "fit": plans,
    "small_models": partial(grid, "small_models", ["GPT-2", "Llama"]),
    "maml": partial(grid, "maml", ["sinusoid, 500 steps", "digits, 500 steps"]),
}


def with_tables(text: str) -> str:
    """A page with its tables as they should be."""

    def new(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES[match[1]]())
        return f"<!-- results: {match[1]} -->\n{lines}\n<!-- end of results -->"

    return re.sub(r"<!-- results: (\w+) -->\n.*?<!-- end of results -->", new, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
