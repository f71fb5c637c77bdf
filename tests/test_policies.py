"""Policies: exactly what is kept and what is recomputed, and gradients that are right."""

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt import checkpoint_name
from funcckpt.errors import InputError
from funcckpt.policies import current_name


class Names(TorchDispatchMode):
    sees_names = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.alias.default and (name := current_name()) is not None:
            self.seen.append((name, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


def named(x):
    return checkpoint_name({"a": x.sin(), "b": 3}, "pair")["a"].sum()


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda x: named(x), (2, 3)),
        (lambda x: grad(named)(x), (2, 3)),
        (lambda x: vmap(grad(named))(x), (2, 3)),
        (lambda x: jvp(named, (x,), (x,)), (2, 3)),
        (lambda x: torch.utils.checkpoint.checkpoint(named, x.requires_grad_(), use_reentrant=False), (2, 3)),
    ],
)
def test_a_name_is_seen_under_every_transform(run, shape):
    with Names() as names:
        run(torch.ones(2, 3))
    assert ("pair", shape) in names.seen


def test_a_name_costs_nothing_where_nobody_looks():
    x = torch.ones(3)
    assert checkpoint_name(x, "x") is x


def test_a_name_is_a_string():
    with pytest.raises(InputError, match="its name, a string"):
        checkpoint_name("x", torch.ones(3))
