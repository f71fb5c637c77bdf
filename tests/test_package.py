"""What `import funcckpt` brings."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import funcckpt

PACKAGE = Path(funcckpt.__file__).parent

IMPORT = """
import sys, torch
before = set(sys.modules)
import funcckpt
print(*sorted(set(sys.modules) - before))
"""


def test_to_import_it_imports_little_more_than_torch():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    new = done.stdout.split()
    assert "funcckpt.core.call" in new
    packages = {name.partition(".")[0] for name in new} - sys.stdlib_module_names
    # Of numpy its random numbers, which are compiled by Cython.
    public = {name for name in packages if not name.startswith(("_", "cython"))}
    assert public <= {"funcckpt", "numpy", "torch"}
    # The FLOP counter imports triton.
    assert {name for name in new if name.startswith("torch.")} <= {"torch.utils._device"}


def test_what_a_star_import_brings():
    names: dict = {}
    exec("from funcckpt import *", names)
    assert names["remat"] is funcckpt.remat and "scan" in names
    assert not {"nn", "policies", "core", "warnings"} & names.keys()
    assert {"remat", "nn", "policies", "meter", "torch_compat", "__version__"} <= {*dir(funcckpt)}
    assert all(hasattr(funcckpt, name) for name in dir(funcckpt))
    assert not {"core", "closures", "tape"} & {*dir(funcckpt)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_functorch_and_private_torch_are_imported_in_one_folder_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        private = [name for name in found if name.startswith(("torch._C", "torch._functorch"))]
        assert path.parent.name == "_torch" or not private


def test_no_cycles_between_modules():
    """What a module imports as it is imported comes before it."""
    root = PACKAGE
    names = {p: ".".join(p.relative_to(root.parent).with_suffix("").parts) for p in root.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): p for p, name in names.items()}
    graph = {name: set() for name in paths if name != "funcckpt"}
    for name in graph:
        for node in ast.parse(paths[name].read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                package = name.split(".") + ["__init__"] * (paths[name].name == "__init__.py")
                base = ".".join([*package[: -node.level], *(node.module or "").split(".")]).strip(".")
                graph[name] |= {next(n for n in (f"{base}.{a.name}", base) if n in paths) for a in node.names}
    graph = {name: found - {name, "funcckpt"} for name, found in graph.items()}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) == len(graph)
