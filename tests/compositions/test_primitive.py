"""The public `torch.autograd.Function`, its own spelling of each rule, and the fallback that it is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import assert_same, no_remat
from torch.func import vmap

from funcckpt import _torch, remat as direct
from funcckpt.core.primitive import Generated, Remat, remat

from .functions import FUNCTIONS
from .stacks import stack
from .test_matrix import inputs

SOME = "trees closure_over_everything nested solve".split()
REVERSE = (
    "vjp_twice | vjp_vmap | vmap_nested | backward | double_backward | vmap_x grad_both | grad_both grad_both | "
    "jacrev_x jacrev_x | vmap_x vmap_w grad_both | grad_both vmap_x grad_x | backward vmap_x grad_both"
).split(" | ")
FORWARD = "jvp_both | jacfwd_same | hessian_x | jvp_both jvp_x | jvp_x grad_both | vmap_x hessian_x".split(
    " | "
)
CELLS = [(s, f, t) for s in (Remat, Generated) for f in SOME for t in REVERSE]
# Second tangents of torch 2.13 disagree with finite differences for solve.
CELLS += [(Remat, f, t) for f in SOME for t in FORWARD if f != "solve" or t in FORWARD[:2]]


@pytest.mark.parametrize(("spelling", "function", "names"), CELLS)
def test_three_spellings_of_the_rules_agree(spelling, function, names):
    transform, make = stack(*names.split()), FUNCTIONS[function]
    expected = transform(make(no_remat))(*inputs())
    for way in (lambda f: remat(f, spelling), direct):
        assert_same(transform(make(way))(*inputs()), expected)


def test_random_numbers_are_those_of_the_call():
    x = torch.ones(5, requires_grad=True)
    out = remat(lambda x: torch.nn.functional.dropout(x, 0.5) * x)(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert_same(gradient, 2 * out.detach())
    noisy = vmap(remat(lambda x: x * torch.rand(3)), randomness="different")(torch.ones(4, 3))
    assert len({tuple(row.tolist()) for row in noisy}) == 4


HIDE = """
import importlib, sys, warnings
import torch, torch._functorch.eager_transforms

x = torch.linspace(0.1, 1, 3)
f = lambda x: torch.sin(x).prod()
for module, name in NAMES:
    module = importlib.import_module(module)
    value = getattr(module, name)
    delattr(module, name)
    for loaded in [key for key in sys.modules if key.partition(".")[0] == "funcckpt"]:
        del sys.modules[loaded]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import funcckpt
    setattr(module, name, value)
    assert any(torch.__version__ in str(w.message) and name in str(w.message) for w in caught), name
    assert not hasattr(funcckpt, "scan")
    found = torch.func.vmap(torch.func.grad(funcckpt.remat(f)))(x[None])
    torch.testing.assert_close(found, torch.func.vmap(torch.func.grad(f))(x[None]))
    print(name)
"""


def private_names():
    """What `_torch` imports from private modules, or by a private name."""
    for path in Path(_torch.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and not node.level and node.module != "torch._functorch":
                names = [(node.module, alias.name) for alias in node.names]
                yield from [name for name in names if "._" in ".".join(name)]


@pytest.mark.exhaustive
def test_remat_where_a_private_name_is_missing():
    """Each in turn: one warning, and remat by the public Function."""
    names = list(private_names())
    ran = subprocess.run(
        [sys.executable, "-c", f"NAMES = {names!r}\n{HIDE}"], capture_output=True, text=True, timeout=600
    )
    assert len(names) > 40 and ran.stdout.split() == [name for _, name in names], ran.stderr
