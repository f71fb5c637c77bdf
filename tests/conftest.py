"""What every test can count on: one thread, a fixed seed, and nothing left behind by the test before."""

import collections
import gc
import itertools
import zlib

import pytest
import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from funcckpt.tape import recompute

torch.set_num_threads(1)
# torch's own test utilities, whose database of modules is used here, forbid flags that Opacus sets.
torch.backends.disable_global_flags = lambda: None


# Above so many cases of one cross product, pairs of its parameters are enough for the five minutes.
MANY = 24


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items):
    products = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            products[item.nodeid.partition("[")[0]].append(item)
    for cases in products.values():
        if len(cases) > MANY:
            mark_exhaustive(cases)


def mark_exhaustive(cases):
    """Mark what adds no new pair of parameters; of two parameters, what adds no third partner to a value."""
    met = collections.Counter()
    for item in sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode())):
        values = factors(item.callspec)
        groups = [*itertools.combinations(values, 2)] if len(values) > 2 else values
        if all(met[group] >= (1 if len(values) > 2 else 3) for group in groups):
            item.add_marker("exhaustive")
        else:
            met.update(groups)


def pytest_collection_finish():
    """What is imported by now stays: many tests collect garbage, which must cost milliseconds."""
    gc.collect()
    gc.freeze()


def factors(callspec):
    """The ids that the decorators have given; of a single one with several parameters, these."""
    values = [*enumerate(callspec._idlist)]
    words = [*map(repr, callspec.params.values())]
    if len(values) == 1 and not any(" at 0x" in word for word in words):  # every process must choose alike
        values = [*enumerate(words)]
    return values


@pytest.fixture(autouse=True)
def state_intact():
    """Seed before the test; after it every level, mode and default of torch must be as it was."""
    torch.manual_seed(0)
    before, excluded = torch.get_default_dtype(), torch._C._dispatch_tls_local_exclude_set()
    yield
    assert peek_interpreter_stack() is None, "a functorch level was left on the stack"
    assert forward_ad._current_level == -1, "a forward AD level was left open"
    assert torch.is_grad_enabled(), "grad mode was left off"
    assert not torch.is_inference_mode_enabled(), "inference mode was left on"
    assert not torch.is_autocast_enabled("cpu"), "autocast was left on"
    assert torch.get_default_dtype() == before, "the default dtype was changed"
    left = torch._C._dispatch_tls_local_exclude_set()
    assert left == excluded, f"torch still skips {left}, and not {excluded}"
    assert torch._C._len_torch_dispatch_stack() == 0, "a TorchDispatchMode was left on"
    assert torch._C._len_torch_function_stack() == 0, "a TorchFunctionMode was left on"


@pytest.fixture(autouse=True)
def recomputations_fail_aloud(monkeypatch):
    """The rerun in full must not hide a bug. It may be for memory that is not there, or an assertion of torch."""

    def blame(error):
        if not isinstance(error, recompute.Redo) and not any(words in str(error) for words in NOT_OURS):
            raise AssertionError("only the full recomputation was right") from error

    monkeypatch.setattr(recompute, "_blame", blame)


@pytest.fixture
def small_sizes_matter(monkeypatch):
    """What is too small to be worth it in practice is large enough to count."""
    monkeypatch.setattr(recompute, "FLOPS_WORTH_A_CALL", 0)
    # What other tests have compiled is none of these.
    monkeypatch.setattr(recompute.functorch, "has_compiled", lambda: False)


NOT_OURS = (
    "Cannot access data pointer",
    "is not supported for tensor subclasses",
    "has_fw_view() INTERNAL ASSERT FAILED",  # svd_lowrank in forward mode over reverse mode
)
