"""The tables of docs/migration.md, for those who come from elsewhere: what stands on the right exists, and gives what
stands on the left gives.
"""

import ast
import copy
import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from support import Storages
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.func import functional_call, grad, vmap

import funcckpt
from funcckpt import per_sample, policies
from funcckpt.nn import Remat, Sequential, apply_remat

PAGE = (Path(__file__).parents[1] / "docs/migration.md").read_text()
ROWS = [
    line.split(" | ")
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| you write")
]
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_what_stands_on_the_right_exists(row):
    for node in parts(row[1]):
        named(node)
        if isinstance(node, ast.Call) and inspect.isfunction(named(node.func)):
            known = inspect.signature(named(node.func)).parameters.values()
            if inspect.Parameter.VAR_KEYWORD not in {p.kind for p in known}:
                assert {k.arg for k in node.keywords} <= {p.name for p in known}, ast.unparse(node)


def test_there_are_rows():
    assert len(ROWS) > 20


# -- torch.utils.checkpoint ---------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model_and_input():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(4, 1)).double(), torch.randn(5, 4).double()


def gradients_and_bytes(forward, model, x):
    with Storages().known(dict(model.named_parameters()), x) as storages:
        out = forward(x).sum()
        kept = storages.live
        return torch.autograd.grad(out, list(model.parameters())), kept


def chained(checkpoint, **options):
    def forward(model, x):
        for block in model[:-1]:
            x = checkpoint(block, x, **options)
        return model[-1](x)

    return forward


OPS = [torch.ops.aten.addmm.default]


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (
            chained(torch_checkpoint.checkpoint, use_reentrant=False),
            chained(funcckpt.checkpoint),
        ),
        (
            chained(torch_checkpoint.checkpoint, use_reentrant=False),
            chained(lambda f, x: funcckpt.remat(f)(x)),
        ),
        (
            lambda model, x: torch_checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False),
            lambda model, x: funcckpt.checkpoint_sequential(model, 2, x),
        ),
        (
            chained(
                torch_checkpoint.checkpoint,
                use_reentrant=False,
                context_fn=partial(torch_checkpoint.create_selective_checkpoint_contexts, OPS),
            ),
            chained(
                funcckpt.checkpoint, context_fn=partial(funcckpt.create_selective_checkpoint_contexts, OPS)
            ),
        ),
        (
            lambda model, x: model(x),
            lambda model, x: Sequential(*model, every=2)(x),
        ),
    ],
    ids=["checkpoint", "remat", "checkpoint_sequential", "selective", "Sequential"],
)
def test_calls_of_torch(theirs, ours):
    """The same gradients, and no more bytes kept."""
    model, x = model_and_input()
    (expected, bytes_of_theirs), (actual, kept) = (
        gradients_and_bytes(partial(f, model), model, x) for f in (theirs, ours)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert kept <= bytes_of_theirs


def test_torch_compat_stands_for_the_module():
    import funcckpt.torch_compat as cp

    assert {*torch_checkpoint.__all__} <= {*vars(cp)} and cp.__all__ == torch_checkpoint.__all__
    ours = ["checkpoint", "checkpoint_sequential", "create_selective_checkpoint_contexts"]
    assert all(getattr(cp, name) is getattr(funcckpt, name) for name in ours)
    with cp.set_checkpoint_early_stop(False):
        assert grad(lambda x: cp.checkpoint(torch.sin, x, use_reentrant=False))(torch.tensor(0.0)) == 1


def test_wrapped_modules():
    """The same modules are chosen, and state dicts are exchanged."""
    plain, x = model_and_input()
    theirs, ours = copy.deepcopy(plain), copy.deepcopy(plain)

    def selected(module):
        return isinstance(module, Block)

    wrapper.apply_activation_checkpointing(theirs, check_fn=selected)
    apply_remat(ours, lambda name, module: selected(module))
    assert [isinstance(m, wrapper.CheckpointWrapper) for m in theirs] == [isinstance(m, Remat) for m in ours]
    states = [copy.deepcopy(m.state_dict()) for m in (theirs, ours)]
    assert list(states[0]) == list(states[1]) == list(plain.state_dict())
    theirs.load_state_dict(states[1])
    ours.load_state_dict(states[0])
    expected, _ = gradients_and_bytes(theirs, theirs, x)
    torch.testing.assert_close(gradients_and_bytes(ours, ours, x)[0], expected, rtol=1e-12, atol=1e-14)


# -- jax.checkpoint -----------------------------------------------------------------------------------


def test_names_of_jax():
    """Those of jax.checkpoint_policies."""
    theirs = """everything_saveable nothing_saveable dots_saveable checkpoint_dots
    dots_with_no_batch_dims_saveable checkpoint_dots_with_no_batch_dims offload_dot_with_no_batch_dims
    save_anything_except_these_names save_any_names_but_these save_only_these_names
    save_from_both_policies save_and_offload_only_these_names"""
    assert not set(theirs.split()) - set(policies.__all__)
    assert grad(funcckpt.remat(torch.sin, prevent_cse=False))(torch.tensor(0.0)) == 1


# -- Opacus -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_gradients_for_each_sample():
    opacus = pytest.importorskip("opacus", reason="needs the extra `models`")
    model, x = model_and_input()
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    wrapped(x).square().sum().backward()
    expected = {n.removeprefix("_module."): p.grad_sample for n, p in wrapped.named_parameters()}
    apply_remat(model, Block)

    def loss(parameters, x):
        return functional_call(model, parameters, (x[None],)).square().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    actual = vmap(grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
    torch.testing.assert_close(per_sample.gradient_norms(loss, parameters, x, chunk_size=2), norms)
