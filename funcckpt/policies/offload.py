"""Keep tensors elsewhere: in the memory of the host, or in files.

To a transform, `store` and `fetch` are the identity. Between them there is a CPU tensor, which a checkpoint
keeps like any other. On disk it is a file, mapped into memory, that the system writes and reads as needed.
"""

from __future__ import annotations

import functools
import tempfile
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._torch import functorch, wrappers
from ..errors import OptionError
from ..tape.operators import tensors_in


class Stored(NamedTuple):
    """A tree whose tensors were moved; `devices` has the old device of each."""

    tree: Any
    devices: tuple[torch.device, ...]


def store(tree: Any, place: str) -> Stored:
    """Move the tensors of a tree to a place: "host" or "disk".

    >>> import torch
    >>> from funcckpt.policies.offload import fetch, store
    >>> fetch(store({"x": torch.arange(3)}, "disk"))
    {'x': tensor([0, 1, 2])}
    """
    if place == "disk" and "functionalize" in functorch.active_kinds():
        raise OptionError('offload="disk" does not work under torch.func.functionalize. Pass "host".')
    moved = pytree.tree_map_only(Tensor, _to_disk if place == "disk" else _to_host, tree)
    return Stored(moved, tuple([x.device for x in tensors_in(tree)]))


def fetch(tree: Any) -> Any:
    """Undo `store`. A tree that was not stored is returned as it is."""
    if not isinstance(tree, Stored):
        return tree
    devices = iter(tree.devices)
    # A mapped tensor is copied, so that it is read from disk once, and not by each operator.
    return pytree.tree_map_only(Tensor, lambda x: x.to(next(devices), copy=True), tree.tree)


def _to_host(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _to_disk(x: Tensor) -> Tensor:
    """A copy, made by an operator that transforms know; then its memory is replaced by that of a file."""
    if x.numel() == 0 or x.is_meta:
        return x.clone()
    moved = _to_host(x)
    parts = wrappers.everything_below(moved)
    if any(map(wrappers.is_legacy_batchedtensor, parts)):
        return moved  # nobody can reach its memory
    with functorch.without_levels():
        for part in parts:
            part.data = _mapped(part.data)
    return moved


def _mapped(x: Tensor) -> Tensor:
    with tempfile.NamedTemporaryFile(prefix="funcckpt-") as file:  # which lives as long as it is mapped
        out = torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype).view(x.shape)
    return out.copy_(x)


# -- for policies ------------------------------------------------------------------------------------


class Offloaded:
    """A tensor of an accelerator, kept in the memory of the host. A side stream copies it."""

    def __init__(self, x: Tensor) -> None:
        x = x.detach()
        self._device = x.device
        self._storage = weakref.ref(x.untyped_storage())
        self.host = _host_memory(x, pinned=_side_stream(x.device) is not None)
        self._done = _copy(self.host, x, x.device)

    def is_about_to_be_written(self) -> None:
        """Let the current stream wait for the copy, unless the copied tensor is gone."""
        if self._done is not None and self._storage() is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Wait until the copy on the host is complete."""
        if self._done is not None:
            self._done.synchronize()

    def back(self, host: Tensor) -> Returning:
        """Begin to copy `host`, the copy on the host or a copy of that, to the device again."""
        x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        return Returning(x, _copy(x, host, self._device))


class Returning(NamedTuple):
    """A tensor that is being filled; the event `done` tells when it is."""

    x: Tensor
    done: Any = None

    def get(self, allow_mutation: bool = False) -> Tensor:
        if self.done is not None:
            torch.accelerator.current_stream(self.x.device).wait_event(self.done)
        return self.x


def is_far(x: Tensor) -> bool:
    """Whether `x` can be offloaded: whether it is not in the memory of the host already."""
    return x.device.type not in ("cpu", "meta") and x.layout is torch.strided


def _host_memory(x: Tensor, pinned: bool) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu", pin_memory=pinned)


def _copy(target: Tensor, source: Tensor, device: torch.device) -> Any:
    """Copy between a device and the host, beside the current stream. Gives an event for the end."""
    side = _side_stream(device)
    on_host = target if target.device != device else source
    if side is None or not on_host.is_pinned():  # a hook of the caller may have moved it
        target.copy_(source)
        return None
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        target.copy_(source, non_blocking=True)
        # The allocator must not reuse the memory of the device tensor before the copy is done.
        (source if on_host is target else target).record_stream(side)
        return side.record_event()


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """A stream for copies; None where there are none, or no pinned memory."""
    return torch.Stream(device) if device.type == "cuda" else None
