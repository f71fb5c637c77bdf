"""What `import funcckpt` brings."""

import subprocess
import sys

import funcckpt

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
    assert not {"core", "closures", "tape"} & {*dir(funcckpt)}
