"""The benchmarks run and agree with each other; the README and the documentation say what they have found."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import common  # noqa: E402
import readme  # noqa: E402

SCRIPTS = [
    *("bilevel", "chunks", "depth", "functorch_grad", "langevin", "loops"),
    *("maml", "per_sample", "power_iteration", "sampler", "sizes", "small_models"),
]


def problems(script):
    return importlib.import_module(script).PROBLEMS


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus
@pytest.mark.parametrize(
    ("script", "problem"),
    [(s, p) for s in SCRIPTS for p in list(problems(s))[: 3 if s == "per_sample" else 1]],
)
def test_methods_agree_at_toy_size(script, problem):
    rows = common.compare(problem, problems(script)[problem](True), rounds=script != "chunks")
    for row in rows:
        assert "saved tensor hooks" in row["error"] if "error" in row else row["peak_bytes"] > 0
        assert row.get("difference", 0) < 1e-4
    assert sum("difference" in row for row in rows) > 2 or script == "chunks"


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", ["backward()", "per-sample gradients"])
def test_the_script_for_plans(problem):
    import fit

    rows = {row["method"]: row for row in common.compare(problem, fit.PROBLEMS[problem](True), rounds=0)}
    for way in ("every second block", "every block"):
        for key in ("peak_bytes", "flops"):
            assert rows[f"fit, bytes of {way}"][key] <= rows[way][key]
    assert ("activation_memory_budget=0.5" in rows) == (problem == "backward()")


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["eager", "eager, remat"])
def test_the_script_for_what_is_compiled(method):
    import compiled

    for problem in compiled.PROBLEMS:
        row = compiled.measured(problem, method, toy=True, rounds=1)
        assert row["seconds"] > 0 and row["problem"] == problem


@pytest.mark.exhaustive
def test_the_script_for_a_gpu(capsys):
    import gpu

    rows = gpu.main(["--toy"])
    plain, ours = rows[:2]
    assert ours["largest_batch"] > plain["largest_batch"] > 1
    assert ours["allocated_bytes"] < plain["allocated_bytes"]
    assert "largest" in capsys.readouterr().out


def test_the_overhead_of_tiny_functions(capsys, tmp_path):
    import overhead

    rows = overhead.main(["--toy", "--out", str(tmp_path / "overhead.json")])
    assert {row["problem"] for row in rows} == {*overhead.CASES}
    assert all(row["seconds"] > 0 for row in rows)
    assert json.loads((tmp_path / "overhead.json").read_text())["rows"] == rows
    assert capsys.readouterr().out.count(" to torch\n") == 6


def test_the_script_for_calls_in_plain_eager_code(capsys, tmp_path):
    import eager_overhead

    path = tmp_path / "found.json"
    rows = eager_overhead.main(["--toy", "--out", str(path)])
    assert [row["case"] for row in rows] == [*eager_overhead.CASES]
    assert all(row["forward"]["ratio"] > 0 < row["forward and backward"]["ratio"] for row in rows)
    assert json.loads(path.read_text())["rows"] == rows
    assert "a transformer layer" in capsys.readouterr().out


@pytest.mark.parametrize("n", range(1, 20))
def test_the_largest_batch(n):
    import gpu

    assert gpu.largest(lambda batch: batch <= n) == n


def test_resident_memory_is_that_of_the_meter():
    """What is larger than any storage that glibc keeps for itself."""
    x = torch.ones(1 << 24)

    def run():
        y = x + 1
        return (y * 2).sum()

    grown = common.resident_growth(run)
    assert grown is None or abs(grown - 2 * x.nbytes) < 0.1 * x.nbytes


def test_tables_of_the_pages():
    """`python tests/benchmarks/readme.py` writes them."""
    for page in readme.PAGES:
        text = page.read_text()
        assert readme.with_tables(text) == text, page.name
        assert text.count("<!-- results: ") == text.count("<!-- end of results -->")
    assert "<!-- results: costs -->" in readme.PAGES[0].read_text()


@pytest.mark.parametrize(
    ("script", "problem"), [("functorch_grad", "cos(sin(x)), 10 times"), ("loops", "128 steps")]
)
def test_results_are_not_worse_than_recorded(script, problem):
    recorded = readme.load(script)
    if recorded["about"]["torch"].split("+")[0] != torch.__version__.split("+")[0]:
        pytest.skip("recorded with another version of torch, which may keep other tensors")
    methods = problems(script)[problem](False)
    rows = [row for row in recorded["rows"] if row["problem"] == problem and row.get("flops") is not None]
    rows = [row for row in rows if any(name in row["method"] for name in ("remat", "scan", "while_loop"))]
    assert rows
    for row in rows:
        peak, flops = methods[row["method"]]().cost()
        assert peak <= row["peak_bytes"] and flops <= row["flops"]
