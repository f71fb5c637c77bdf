"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import sys

import pytest


@pytest.mark.parametrize("name", ["checkpoint", "patched", "scope", "selective", "sequential"])
def test_examples(name):
    importlib.import_module(f"funcckpt.eager.{name}")
    result = doctest.testmod(sys.modules[f"funcckpt.eager.{name}"])
    assert result.failed == 0 and result.attempted > 3
