"""What is written for users holds: examples in docstrings, README and pages, and that there are any."""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import library_of_models
from torch import nn
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

import funcckpt
import funcckpt.meter
import funcckpt.nn
import funcckpt.per_sample
from funcckpt import policies, remat
from funcckpt._torch import functorch
from funcckpt.meter import mark

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]

MODULES = [
    module.name
    for module in pkgutil.walk_packages(funcckpt.__path__, "funcckpt.")
    if not module.name.endswith("__main__")
]


def examples_of(name):
    module = importlib.import_module(name)
    return [test for test in doctest.DocTestFinder(exclude_empty=True).find(module, name) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    # What other tests have compiled changes what a recomputation leaves out.
    monkeypatch.setattr(functorch, "has_compiled", lambda: False)
    if name == "funcckpt.inspect.plot":
        pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    runner = doctest.DocTestRunner()
    for test in examples_of(name):
        output = []
        assert runner.run(test, out=output.append).failed == 0, "".join(output)


def public():
    """Functions and classes that users call, by their names."""
    found = {}
    for module in (funcckpt, funcckpt.meter, funcckpt.nn, funcckpt.per_sample, funcckpt.policies):
        for name in getattr(module, "__all__", vars(module)):
            item = getattr(module, name)
            is_here = getattr(item, "__module__", "").startswith(module.__name__)
            if is_here and (inspect.isfunction(item) or inspect.isclass(item)) and not name.startswith("_"):
                found.setdefault(item, f"{module.__name__}.{name}")
    return found


@pytest.mark.parametrize("item", public(), ids=public().values())
def test_everything_public_is_documented(item):
    text = inspect.getdoc(item)
    assert text and text != inspect.getdoc(item.__mro__[1] if inspect.isclass(item) else None)
    options = inspect.signature(item).parameters if inspect.isfunction(item) else {}
    if options and "ctx" not in options:  # Nobody calls a policy; the module says what its parameters are.
        assert ">>>" in text, "no example"
        for option in options:
            assert re.search(rf"\b{option}\b", text), f"{option} is not described"


def test_the_site_holds_all_of_it(tmp_path):
    """It is built without a warning, so its links lead somewhere; and everything public is in its reference."""
    pytest.importorskip("myst_parser", reason="needs the extra `docs`")
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "docs", tmp_path], cwd=ROOT, check=True)
    text = (tmp_path / "reference.html").read_text()
    for name in public().values():
        assert f'id="{name}"' in text, name
    assert "Write R[f]" in (tmp_path / "how_it_works.html").read_text()
    for page in PAGES[1:]:
        assert page.stem == "index" or f'href="{page.stem}.html"' in (tmp_path / "index.html").read_text()


class Block(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)


def names_of_the_reader():
    """What the examples of the pages take for granted: torch, and functions and data of the reader's own."""

    def loss(parameters, x, y=0.0):
        out = x @ pytree.tree_leaves(parameters)[0]
        mark("saved")
        return (out.sum(-1) - y).square().mean()

    def with_remat(blocks, x):
        for p in blocks:
            x = remat(lambda p, x: x + torch.tanh(x @ p["up"]) @ p["down"])(p, x)
        return x.square().sum()

    layers, blocks = [Block() for _ in range(4)], [{"up": torch.randn(3, 8), "down": torch.randn(8, 3)}] * 3
    model = nn.Linear(3, 4)
    model.blocks = nn.ModuleList(layers)
    model.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    x = torch.randn(6, 3)
    return {
        "torch": torch, "grad": grad, "vmap": vmap, "partial": functools.partial,
        "f": grad(loss), "g": grad(with_remat), "args": (blocks, x), "weight": torch.randn(3, 3),
        "self": nn.Module(), "Block": Block, "model": model, "layers": layers,
        "parameters": {"w": torch.randn(3, 4)}, "blocks": blocks,
        "x": x, "y": torch.randn(6), "x_test": torch.randn(2, 3), "y_test": torch.randn(2),
        "loss": loss, "with_remat": with_remat, "noise": torch.randn_like,
        "block": lambda *args: torch.tanh(args[-1]),
        "meta": {"init": torch.randn(3, 1), "rate": torch.tensor(0.1)}, "batches": x[:, None], "held_out": x,
        "update": lambda p, gradient, meta: p - meta["rate"] * gradient,
        "step": lambda carry, x: (carry + x, carry), "init": torch.zeros(3), "xs": torch.randn(12, 3),
        "going_on": lambda carry: carry.sum() < 5, "body": lambda carry: carry + 1,
        "policy": policies.dots_saveable, "other_policy": policies.nothing_saveable,
    }  # fmt: skip


def blocks(page):
    return re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", page.read_text(), flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("number", range(len(blocks(README))))
def test_examples_of_the_readme(number, monkeypatch, capsys):
    text, printed = blocks(README)[number]
    monkeypatch.setattr(functorch, "has_compiled", lambda: False)
    exec(compile(text, f"README.md, example {number}", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("page", "number"), [(p, i) for p in PAGES[1:] for i in range(len(blocks(p)))])
def test_examples_of_the_pages(page, number, monkeypatch):
    text, _ = blocks(page)[number]
    monkeypatch.setattr(functorch, "has_compiled", lambda: False)
    names = names_of_the_reader()
    if "plot" in text:
        pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra `plot`")
        pyplot.switch_backend("agg")
    if "import transformers" in text:
        library_of_models("transformers")
    if "import RDPAccountant" in text:
        pytest.importorskip("opacus", reason="needs the extra `models`")
    if "from funcckpt" not in text:
        names.update(vars(funcckpt))
    exec(compile(text, f"{page.name}, example {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    text = page.read_text()
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    names = re.findall(r"\]\((?!http)([^)#]*[./][^)#]*)\)", prose) + re.findall(r"python (\S+/\S+\.py)", text)
    for name in names:
        assert (page.parent / name).exists() or (ROOT / name).exists(), name


def test_the_version_is_in_the_changelog():
    assert f"## {funcckpt.__version__}" in (ROOT / "CHANGELOG.md").read_text()
