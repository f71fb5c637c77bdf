"""docs/migration.md, for those who come from elsewhere: what stands on the right of its tables exists, and stands for
what is on the left.
"""

import ast
import copy
import inspect
import re
from pathlib import Path

import torch
import torch.utils.checkpoint as torch_checkpoint
from support import assert_same
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.func import grad, vmap

import funcckpt
import funcckpt.torch_compat as cp
from funcckpt import per_sample, policies
from funcckpt.nn import Remat, apply_remat

PAGE = (Path(__file__).parents[1] / "docs/migration.md").read_text()
ROWS = re.findall(r"^\| (?!you write)(.*?) \| (.*)", PAGE, flags=re.MULTILINE)
NAMES = {**vars(funcckpt), "per_sample": per_sample, "vmap": vmap, "grad": grad}


def parts(cell):
    """Of the pieces of code in a cell, which may be fragments."""
    for text in re.findall(r"`([^`]+)`", cell):
        if re.match(r"\w+=", text):
            text = f"_({text.removesuffix('=')})"
        text = text.removeprefix("@") + (" pass" if text.endswith(":") else "")
        yield from ast.walk(ast.parse(text))


def named(node):
    """What of funcckpt's a name or an attribute stands for."""
    if isinstance(node, ast.Name):
        return NAMES.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return getattr(NAMES[node.value.id], node.attr)
    return None


def test_what_stands_on_the_right_exists():
    assert len(ROWS) > 20
    for _, right in ROWS:
        for node in parts(right):
            named(node)
            if isinstance(node, ast.Call) and inspect.isfunction(named(node.func)):
                known = inspect.signature(named(node.func)).parameters.values()
                if inspect.Parameter.VAR_KEYWORD not in {p.kind for p in known}:
                    assert {k.arg for k in node.keywords} <= {p.name for p in known}, ast.unparse(node)


def test_torch_compat_stands_for_the_module():
    assert {*torch_checkpoint.__all__} <= {*vars(cp)} and cp.__all__ == torch_checkpoint.__all__
    ours = ["checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts"]
    assert all(getattr(cp, name) is getattr(funcckpt, name) for name in ours)
    with cp.set_checkpoint_early_stop(False):
        assert grad(lambda x: cp.checkpoint(torch.sin, x, use_reentrant=False))(torch.tensor(0.0)) == 1


def test_names_of_jax():
    """Those of jax.checkpoint_policies."""
    theirs = """everything_saveable nothing_saveable dots_saveable checkpoint_dots
    dots_with_no_batch_dims_saveable checkpoint_dots_with_no_batch_dims offload_dot_with_no_batch_dims
    save_anything_except_these_names save_any_names_but_these save_only_these_names
    save_from_both_policies save_and_offload_only_these_names"""
    assert not set(theirs.split()) - set(policies.__all__)
    assert grad(funcckpt.remat(torch.sin, prevent_cse=False))(torch.tensor(0.0)) == 1


def test_wrapped_modules():
    """The same modules are chosen as by torch's wrapper, and state dicts are exchanged."""
    pairs = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    plain = nn.Sequential(*pairs, nn.Linear(4, 1)).double()
    theirs, ours = copy.deepcopy(plain), copy.deepcopy(plain)
    chosen = lambda m: type(m) is nn.Sequential and len(m) == 2
    wrapper.apply_activation_checkpointing(theirs, check_fn=chosen)
    apply_remat(ours, lambda name, m: chosen(m))
    assert [isinstance(m, wrapper.CheckpointWrapper) for m in theirs] == [isinstance(m, Remat) for m in ours]
    assert list(theirs.state_dict()) == list(ours.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        [p.mul_(2) for p in theirs.parameters()]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 4).double()
    found = [torch.autograd.grad(m(x).sum(), list(m.parameters())) for m in (ours, theirs)]
    assert_same(*found)
    theirs.load_state_dict(ours.state_dict())
