"""A stand-in for a second device."""

from types import SimpleNamespace

import pytest
import torch

from funcckpt import world

from .implementations import D


@pytest.fixture
def other_device(monkeypatch):
    """A generator that stands for the random stream of another device, from which `draw` draws."""
    generator = torch.Generator().manual_seed(5)
    module = SimpleNamespace(is_initialized=lambda: True, default_generators=(generator,))
    monkeypatch.setattr(world, "autocast_devices", lambda: ("cpu", "cpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with torch.library._scoped_library("funcckpt_tests", "DEF") as library:
        library.define("draw(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
        library.impl("draw", lambda x: torch.rand(x.shape, dtype=D, generator=generator), "CPU")
        yield generator
