"""What is written for users holds: examples in docstrings and README, and that there are any."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import funcckpt
import funcckpt.meter
import funcckpt.nn
import funcckpt.per_sample
import funcckpt.plot
from funcckpt import _torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

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
    monkeypatch.setattr(_torch, "has_compiled", lambda: False)
    if name == "funcckpt.plot":
        pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    runner = doctest.DocTestRunner()
    for test in examples_of(name):
        output = []
        assert runner.run(test, out=output.append).failed == 0, "".join(output)


def public():
    """Functions and classes that users call."""
    found = []
    for module in (funcckpt, funcckpt.meter, funcckpt.nn, funcckpt.per_sample, funcckpt.policies):
        for name, item in vars(module).items():
            own = getattr(item, "__module__", "").startswith("funcckpt")
            called = inspect.isfunction(item) or inspect.isclass(item)
            here = module is funcckpt or getattr(item, "__module__", None) == module.__name__
            here = here and name in getattr(module, "__all__", [name])
            if own and called and here and not name.startswith("_"):
                found.append(pytest.param(item, id=f"{module.__name__}.{name}"))
    return found


@pytest.mark.parametrize("item", public())
def test_everything_public_is_documented(item):
    text = inspect.getdoc(item)
    assert text and text != inspect.getdoc(item.__mro__[1] if inspect.isclass(item) else None)
    options = inspect.signature(item).parameters if inspect.isfunction(item) else {}
    if options and "ctx" not in options:  # Nobody calls a policy; the module says what its parameters are.
        assert ">>>" in text, "no example"
        for option in options:
            assert re.search(rf"\b{option}\b", text), f"{option} is not described"


def test_the_reference_holds_all_of_it(tmp_path, monkeypatch):
    pytest.importorskip("pdoc", reason="needs the extra `docs`")
    monkeypatch.setattr(funcckpt, "__all__", [], raising=False)  # The script sets it.
    runpy.run_path(str(ROOT / "docs/reference.py"))["main"](tmp_path)
    for parameter in public():
        page, name = parameter.id.rpartition(".")[::2]
        text = (tmp_path / f"{page.replace('.', '/')}.html").read_text()
        _, found, section = text.partition(f'<section id="{name}">')
        assert found, parameter.id
        section, *_ = section.partition("</section>")
        assert not re.search(r"\b(Parameters|Returns|Raises|Examples)\s*-----|:\w+:<|:func:", section), (
            parameter.id
        )


def blocks():
    text = README.read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_examples_of_the_readme():
    """They are Python, and what they import from funcckpt exists and is called with what it takes."""
    assert len(blocks()) > 3
    for block in blocks():
        tree = ast.parse(block.replace("def block(x): ...", "def block(x): pass"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("funcckpt"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                f = next(
                    (getattr(m, node.func.id) for m in (funcckpt, funcckpt.nn, funcckpt.per_sample, funcckpt.plot)
                     if hasattr(m, node.func.id)),
                    None,
                )  # fmt: skip
                if inspect.isfunction(f):
                    options = [k.arg for k in node.keywords if k.arg]
                    known = inspect.signature(f).parameters
                    kinds = {p.kind for p in known.values()}
                    assert inspect.Parameter.VAR_KEYWORD in kinds or set(options) <= known.keys(), (
                        ast.unparse(node)
                    )


def test_links_of_the_readme():
    """Files that it names exist."""
    text = README.read_text()
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    names = re.findall(r"\]\((?!http)([^)#]*[./][^)#]*)\)", prose) + re.findall(r"python (\S+/\S+\.py)", text)
    assert names
    for name in names:
        assert (ROOT / name).exists(), name


def test_the_version_is_in_the_changelog():
    assert f"## {funcckpt.__version__}" in (ROOT / "CHANGELOG.md").read_text()
