"""The benchmarks run and agree with each other; the README and the documentation say what they have found."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import common
import loops
import overhead
import per_sample
import readme

ALL = {**loops.BENCHMARKS, **per_sample.BENCHMARKS}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # Opacus
@pytest.mark.parametrize("name", ALL)
def test_methods_agree_at_toy_size(name):
    for problem in list(ALL[name].problems)[: 3 if name == "per_sample" else 1]:
        rows = common.compare(problem, ALL[name].problems[problem](True), rounds=ALL[name].rounds > 0)
        for row in rows:
            assert "saved tensor hooks" in row["error"] if "error" in row else row["peak_bytes"] > 0
            assert row.get("difference", 0) < 1e-4
        assert sum("difference" in row for row in rows) > 2 or name == "chunks"


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem", ["backward()", "per-sample gradients"])
def test_the_script_for_plans(problem):
    import fit

    found = common.compare(problem, fit.BENCHMARKS["fit"].problems[problem](True), rounds=0)
    rows = {row["method"]: row for row in found}
    for way in ("every second block", "every block"):
        for key in ("peak_bytes", "flops"):
            assert rows[f"fit, bytes of {way}"][key] <= rows[way][key]
    assert ("activation_memory_budget=0.5" in rows) == (problem == "backward()")


@pytest.mark.exhaustive
def test_the_script_for_what_is_compiled():
    import compiled

    for method in ("eager", "eager, remat"):
        for problem in compiled.PROBLEMS:
            row = compiled.measured(problem, method, toy=True, rounds=1)
            assert row["seconds"] > 0 and row["problem"] == problem


@pytest.mark.exhaustive
def test_the_script_for_a_gpu(capsys):
    import gpu

    assert [gpu.largest(lambda batch, n=n: batch <= n) for n in range(20)] == [*range(20)]
    plain, ours, *rest = gpu.main(["--toy"])
    assert ours["largest_batch"] > plain["largest_batch"] > 1
    assert ours["peak_bytes"] < plain["peak_bytes"] and "largest" in capsys.readouterr().out
    assert len({row["problem"] for row in rest}) == 8 and all(row["milliseconds"] > 0 for row in rest)


@pytest.mark.parametrize("name", ["overhead", "eager_overhead"])
def test_the_script_for_calls(name, capsys, tmp_path):
    rows = overhead.main([name, "--toy", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"] == rows and found["about"]["command"].endswith(name + ".py" * (name == "overhead"))
    printed = capsys.readouterr().out
    if name == "overhead":
        assert {row["problem"] for row in rows} == {*overhead.CASES} and printed.count(" to torch\n") == 8
        assert all(row["seconds"] > 0 for row in rows)
    else:
        assert [row["case"] for row in rows] == [*overhead.EAGER_CASES] and "a transformer layer" in printed
        assert all(row["forward"]["ratio"] > 0 < row["forward and backward"]["ratio"] for row in rows)


def test_resident_memory_is_that_of_the_meter():
    """What is larger than any storage that glibc keeps for itself."""
    x = torch.ones(1 << 24)
    grown = common.resident_growth(lambda: ((x + 1) * 2).sum())
    assert grown is None or abs(grown - 2 * x.nbytes) < 0.1 * x.nbytes


def test_tables_of_the_pages():
    """`python tests/benchmarks/readme.py` writes them."""
    for page in readme.PAGES:
        text = page.read_text()
        assert readme.with_tables(text) == text, page.name
        assert text.count("<!-- results: ") == text.count("<!-- end of results -->")
    assert "<!-- results: costs -->" in readme.PAGES[0].read_text()


@pytest.mark.parametrize("name", ["functorch_grad", "loops"])
def test_results_are_not_worse_than_recorded(name):
    recorded = readme.load(name)
    if recorded["about"]["torch"].split("+")[0] != torch.__version__.split("+")[0]:
        pytest.skip("recorded with another version of torch, which may keep other tensors")
    problem = {"functorch_grad": "cos(sin(x)), 10 times", "loops": "128 steps"}[name]
    methods = ALL[name].problems[problem](False)
    rows = [row for row in recorded["rows"] if row["problem"] == problem and row.get("flops") is not None]
    rows = [row for row in rows if any(name in row["method"] for name in ("remat", "scan", "while_loop"))]
    assert rows
    for row in rows:
        peak, flops = methods[row["method"]]().cost()
        assert peak <= row["peak_bytes"] and flops <= row["flops"]
