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


def by_problem(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """{problem: {method: row}}"""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in load(name)["rows"]:
        found.setdefault(row["problem"], {})[row["method"]] = row
    return found


def grid(name: str, problems: Sequence[str] = ()) -> list[str]:
    """A table for each problem, or for those that are named: a line for each method."""
    lines = []
    for problem, rows in by_problem(name).items():
        if problems and problem not in problems:
            continue
        of_it = [row for row in rows.values() if "error" not in row]
        is_timed = ["time_ratio"] if "time_ratio" in of_it[0] else []
        body = [
            [
                row["method"],
                mebibytes(row["peak_bytes"]),
                f"{row['flops'] / of_it[0]['flops']:.2f}" if row["flops"] else "",
                *[f"{row[key]:.2f}" for key in is_timed],
            ]
            for row in of_it
        ]
        lines += [*table([problem, "peak MiB", "FLOPs", *["time"] * len(is_timed)], body), ""]
    return lines[:-1] + sources(name)


def costs() -> list[str]:
    """Of `remat`, in parts of what it takes without, by the width of the model."""
    ratio = lambda of, key: f"{of['remat'][key] / of['plain'][key]:.2f}"
    body = [
        [problem, *[ratio(of, key) for key in ("peak_bytes", "flops")], f"{of['remat']['time_ratio']:.2f}"]
        for problem, of in by_problem("sizes").items()
    ]
    return table(["transformer of 6 blocks", "peak bytes", "FLOPs", "time"], body) + sources("sizes")


def issues() -> list[str]:
    """One line each of those that have been recorded."""
    link = "[{0}](https://github.com/pytorch/pytorch/issues/{0})".format
    in_eager = "torch.utils.checkpoint"
    lines = [
        ("functorch_grad", "cos(sin(x)), 10 times", f"`grad` of ten cos(sin(x)) ({link(134612)})",
         ("torch.func.grad", f"torch.autograd.grad, {in_eager}", "torch.func.grad, remat", "", "")),
        ("power_iteration", "10,000 steps", f"`grad` of 10,000 power iterations, 20 at a time ({link(125591)})",
         ("torch.func.grad", f"plain eager, {in_eager}", "torch.func.grad, remat", "torch.func.grad, scan", "JAX, jax.checkpoint")),
        *[
            ("sampler", f"{n} steps", f"`jacrev` through a sampler of {n} steps ({link(141845)})",
             ("jacrev", "", "jacrev, remat", "jacrev, scan", "JAX, jax.checkpoint"))
            for n in (8, 512)
        ],
    ]  # fmt: skip
    lines = [line for line in lines if (RESULTS / f"{line[0]}.json").exists()]
    head = ["peak MiB", "torch.func", f"`{in_eager}`, plain eager", "`remat`", "`scan`", "`jax.checkpoint`"]
    body = []
    for name, problem, title, columns in lines:
        rows = by_problem(name)[problem]
        said = {
            m: mebibytes(row["peak_bytes"]) if "peak_bytes" in row else "refuses" for m, row in rows.items()
        }
        body.append([title, *[said.get(method, "") for method in columns]])
    columns = [column for column in zip(head, *body, strict=True) if any(column[1:])]
    head, *body = zip(*columns, strict=True)
    return table(head, body) + sources(*dict.fromkeys(name for name, *_ in lines))


def depth() -> list[str]:
    summary, rows = load("depth")["summary"], by_problem("depth")

    def cells(kind: str, method: str) -> list[str]:
        if method not in summary[kind]:
            return ["", "", ""]
        ends = [mebibytes(rows[f"{n} blocks: {kind}"][method]["peak_bytes"]) for n in (4, 96)]
        return [" to ".join(ends), *[f"n^{summary[kind][method][what]:.2f}" for what in ("bytes", "time")]]

    kinds = ("`grad`", "`vmap(grad)`")
    head = ["4 to 96 blocks", *[f"{kind}: {what}" for kind in kinds for what in ("MiB", "bytes", "time")]]
    body = [[way, *cells("input", way), *cells("per sample", way)] for way in summary["input"]]
    return table(head, body) + sources("depth")


def chunks() -> list[str]:
    summary = load("chunks")["summary"]
    gradient = summary["gradient_bytes"]
    ways = ["remat", "chunk_size=2", "remat, chunk_size=2"]
    jobs = {"all gradients": "all", "clipped sum": "clipped sum"}
    head = ["activations / gradient", *[f"{said}: {way}" for said in jobs.values() for way in ways]]
    peaks = [{way: row["peak_bytes"] for way, row in rows.items()} for rows in by_problem("chunks").values()]
    body = [
        [
            f"{activations / gradient:.1f}",
            *[f"{of[f'{job}: {way}'] / of[f'{job}: neither']:.2f}" for job in jobs for way in ways],
        ]
        for of, activations in zip(peaks, summary["activation_bytes"], strict=True)
    ]
    return table(head, body) + sources("chunks")


def loops() -> list[str]:
    found = load("loops")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        rows.setdefault(row["method"], []).append(row)
    longest = rows["plain loop"][-1]
    ends = [rows["plain loop"][i]["problem"] for i in (1, -1)]
    body = []
    for method, (timed, *of_lengths) in rows.items():
        kib = [f"{row['peak_bytes'] / 1024:,.0f}" for row in (of_lengths[0], of_lengths[-1])]
        flops = of_lengths[-1]["flops"]
        body.append(
            [
                method,
                *kib,
                f"n^{found['summary'][method]:.2f}",
                f"{flops / longest['flops']:.2f}" if flops else "",
                f"{timed['time_ratio']:.2f}",
            ]
        )
    timed = rows["plain loop"][0]["problem"]
    head = ["peak KiB", *ends, "bytes", f"FLOPs, {ends[1]}", timed]
    return table(head, body) + sources("loops")


def overhead() -> list[str]:
    """Of calls of `remat`, to what each case is compared with."""
    body = []
    for case, of in by_problem("overhead").items():
        peer = next(method for method, row in of.items() if row["time_ratio"] == 1)
        said = "`torch.utils.checkpoint`" if peer == "torch" else peer
        body.append([case, said, f"{of['remat']['time_ratio']:.2f}"])
    return table(["`remat`", "compared with", "time"], body) + sources("overhead")


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
    for problem, of_it in by_problem("compiled").items():
        body = [
            [
                method,
                f"{row['seconds'] / of_it['eager']['seconds']:.2f}",
                f"{(row['resident_bytes'] or 0) / 2**20:.0f}",
                f"{row['first_call']:.0f}",
            ]
            for method, row in of_it.items()
        ]
        lines += [*table([problem, "time", "resident MiB", "first call, s"], body), ""]
    return lines[:-1] + sources("compiled")


def plans() -> list[str]:
    """The plans of `fit`; and how many are equal to the best of all plans of a smaller model."""
    head = ["all plans of 4 blocks", "plans", "budgets", "best plan found"]
    summary = load("fit")["summary"]
    body = [
        [problem, *[str(found[key]) for key in ("plans", "budgets", "equal to the best")]]
        for problem, found in summary.items()
    ]
    *lines, empty, source = grid("fit")
    return [*lines, "", *table(head, body), empty, source]


TABLES: dict[str, Callable[[], list[str]]] = {
    "costs": costs,
    "sizes": partial(grid, "sizes"),
    "per_sample": partial(grid, "per_sample"),
    "issues": issues,
    "depth": depth,
    "chunks": chunks,
    "loops": loops,
    "fit": plans,
    "compiled": compiled,
    "small_models": partial(grid, "small_models", ["GPT-2", "Llama"]),
    "overhead": overhead,
    "eager_overhead": eager_overhead,
    "bilevel": partial(grid, "bilevel"),
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
