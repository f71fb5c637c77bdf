"""The notebooks run from top to bottom, and are committed as they ran."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
assert [path.name.split("-")[0] for path in NOTEBOOKS] == [str(i + 1) for i in range(len(NOTEBOOKS))] != []


def text_of(cell):
    """What a code cell printed or returned, without plots."""
    outputs = cell.get("outputs", [])
    return "".join(["".join(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs])


def without_digits(text):
    """Columns are as wide as their numbers are long."""
    return re.sub(r"\s+", " ", re.sub(r"[-+.\d]+", "0", text))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_with_outputs(path):
    first, *_ = every = json.loads(path.read_text())["cells"]
    cells = [cell for cell in every if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "run it anew, and save"
    assert f"`jupyter execute --inplace notebooks/{path.name}`" in "".join(first["source"])
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot"
    for cell in cells:
        assert not re.search(r"(^|\s)/(home|root|work|tmp|usr)/", text_of(cell)), "a path of some machine"


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebooks`")
    pytest.importorskip("ipykernel", reason="needs the extra `notebooks`")
    # Threads that wait for each other beside another test take minutes for seconds.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    before = [text_of(cell) for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell, text in zip(notebook.cells, before):
        if "Error:" not in text:
            assert without_digits(text_of(cell)) == without_digits(text), cell.source
