# mypy: warn-unused-ignores
"""A program of a user, for type checkers: nothing loses its type. It is not run."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from funcckpt import checkpoint, fori_loop, policies, remat, scan, while_loop
from funcckpt.nn import Remat, apply_remat


class Block(nn.Module):
    width = 8

    def forward(self, x: Tensor) -> Tensor:
        return x


def loss(w: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
    return (w @ x).sum() * scale


@remat(policy=policies.dots_saveable)
def decorated(x: Tensor) -> tuple[Tensor, int]:
    return x, 3


x = torch.ones(3)
assert_type(remat(loss)(x, x, scale=2.0), Tensor)
assert_type(decorated(x), tuple[Tensor, int])
assert_type(checkpoint(loss, x, x), Tensor)
assert_type(Remat(Block()), Block)  # type: ignore[assert-type]
width: int = Remat(Block()).width
assert_type(apply_remat(Block(), "every 2"), Block)


def step(carry: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], None]:
    return {"h": carry["h"] + x}, None


assert_type(scan(step, {"h": x}, x), tuple[dict[str, Tensor], None])
assert_type(fori_loop(0, 3, lambda i, y: y * i, x), Tensor)
assert_type(while_loop(lambda y: y.sum() < 3, torch.sin, x), Tensor)

# What is wrong is told.
remat(loss, determinism_check="value")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
remat(loss)(x, 3)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
scan(step, {"h": x}, x, checkpoint="twice")  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
