"""Keep tensors elsewhere: in the memory of the host, or in files.

`store` is the identity as far as any transform can see, and so is `fetch`. What lies between them is a
tensor of the CPU, which a checkpoint keeps as it keeps any other. One that is on disk is a file that is
mapped into memory: the system writes it out, and reads it again, as it sees fit.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _torch
from .errors import OptionError

__all__ = ["Stored", "check_place", "fetch", "store"]

_PLACES = ("host", "disk")


class Stored(NamedTuple):
    """A tree whose tensors are elsewhere; `devices` says where each leaf has been."""

    tree: Any
    devices: tuple[str, ...]


def check_place(place: str | None, name: str) -> None:
    if place is not None and place not in _PLACES:
        raise OptionError(f"{name}: offload={place!r} is none of None, 'host' and 'disk'.")


def store(tree: Any, place: str) -> Stored:
    """The tensors of a tree, elsewhere.

    >>> import torch
    >>> from funcckpt.offload import fetch, store
    >>> fetch(store({"x": torch.arange(3)}, "disk"))
    {'x': tensor([0, 1, 2])}
    """
    leaves, structure = pytree.tree_flatten(tree)
    devices = tuple([str(x.device) if isinstance(x, Tensor) else "" for x in leaves])
    if place == "disk" and any(layer.kind == "functionalize" for layer in _torch.active_layers()):
        raise OptionError('offload="disk" maps files, which torch.func.functionalize cannot. Take "host".')
    move = _MapToDisk.apply if place == "disk" else lambda x: x.to("cpu", copy=True)
    moved = [move(x) if isinstance(x, Tensor) else x for x in leaves]
    return Stored(pytree.tree_unflatten(moved, structure), devices)


def fetch(tree: Any) -> Any:
    """A tree as it was before it was stored; any other tree as it is."""
    if not isinstance(tree, Stored):
        return tree
    leaves, structure = pytree.tree_flatten(tree.tree)
    # What is mapped is read into memory once, and not by each operator.
    back = [
        x.to(device, copy=True) if isinstance(x, Tensor) else x
        for x, device in zip(leaves, tree.devices, strict=True)
    ]
    return pytree.tree_unflatten(back, structure)


class _MapToDisk(torch.autograd.Function):
    """A copy in a file. Its derivative is a move as well."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _mapped(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.device = inputs[0].device
        if not (output.is_floating_point() or output.is_complex()):
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct.to(ctx.device)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        # Forward mode is switched off in here; a Function finds its levels all the same.
        mapped: Tensor = _MapToDisk.apply(tangent)
        return mapped

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        return _MapToDisk.apply(x), in_dims[0]


def _mapped(x: Tensor) -> Tensor:
    if x.numel() == 0 or x.is_meta:
        return x.to("cpu", copy=True) if not x.is_meta else x.clone()
    handle, path = tempfile.mkstemp(prefix="funcckpt-")
    os.close(handle)
    try:
        out = torch.from_file(path, shared=True, size=x.numel(), dtype=x.dtype).view(x.shape)
    finally:
        os.unlink(path)  # The mapping keeps the file, and is the last to do so.
    return out.copy_(x)


# -- for policies ------------------------------------------------------------------------------------


class Offloaded:
    """A tensor of an accelerator, kept in the memory of the host.

    The copy there is made by a stream of its own, into pinned memory, while the forward goes on; the copy
    back by the stream that needs it.
    """

    def __init__(self, x: Tensor) -> None:
        x = x.detach()
        self._device = x.device
        self._done: Any = None
        self.host = torch.empty_strided(
            x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=_can_pin(x)
        )
        if not self.host.is_pinned():
            self.host.copy_(x)
            return
        side = _side_stream(x.device)
        side.wait_stream(torch.accelerator.current_stream(x.device))
        with side:
            self.host.copy_(x, non_blocking=True)
            self._done = side.record_event()
        # Its memory is not given to another tensor before the copy is made.
        x.record_stream(side)

    def get(self, allow_mutation: bool) -> Tensor:
        return self.back(self.host)

    def back(self, host: Tensor) -> Tensor:
        """`host`, which is the copy there or a copy of it, on the device again."""
        if self._done is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._done)
        x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        return x.copy_(host, non_blocking=self._done is not None and host.is_pinned())


def is_far(x: Tensor) -> bool:
    """Whether offloading moves `x`: whether it is not in the memory of the host already."""
    return x.device.type not in ("cpu", "meta") and x.layout is torch.strided


def _can_pin(x: Tensor) -> bool:
    return x.device.type == "cuda"


_side_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    if device not in _side_streams:
        _side_streams[device] = torch.Stream(device)
    return _side_streams[device]
