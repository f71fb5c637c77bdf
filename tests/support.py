"""Helpers that several test files share: comparing and counting.

Every comparison is with the same function without remat, in float64, so the tolerances below are
those of rounding in another order of the same operations, and no test may widen them.
"""

import contextlib
import functools
import itertools
import queue
import re
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt import checkpoint, remat

RTOL, ATOL = 1e-10, 1e-12


def seeds(few, count, start=0):
    """Numbers of random programs: some for the five minutes, and the rest for the run that is exhaustive."""
    rest = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(start + few, start + count)]
    return [*range(start, start + min(few, count)), *rest]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Sine(torch.autograd.Function):
    """Without a rule for forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def registered(table):
    """A decorator that puts functions into a table, by their names."""

    def put(f):
        table[f.__name__] = f
        return f

    return put


WRAPS = {"remat": remat, "checkpoint": lambda f: functools.partial(checkpoint, f, use_reentrant=False)}


def no_remat(f=None, **options):
    """Stands where `remat` stands, and does nothing: the reference."""
    return f if f is not None else lambda f: f


def assert_same(actual, expected, what="result"):
    """Same tree, same leaves: type, shape, dtype, device, requires_grad and values."""
    actual_leaves, actual_tree = pytree.tree_flatten(actual)
    expected_leaves, expected_tree = pytree.tree_flatten(expected)
    assert actual_tree == expected_tree, f"{what}: structure is {actual_tree}, without remat {expected_tree}"
    for i, (a, e) in enumerate(zip(actual_leaves, expected_leaves)):
        where = f"{what}, leaf {i}"
        if not isinstance(e, torch.Tensor):
            assert type(a) is type(e) and a == e, f"{where}: {a!r}, without remat {e!r}"
            continue
        assert isinstance(a, torch.Tensor), f"{where}: {type(a).__name__}, without remat a tensor"
        assert a.requires_grad == e.requires_grad, (
            f"{where}: requires_grad is {a.requires_grad}, without remat {e.requires_grad}"
        )
        if not (e.is_floating_point() or e.is_complex()):
            assert a.dtype == e.dtype and a.device == e.device and torch.equal(a, e), (
                f"{where}: {a}, without remat {e}"
            )
            continue
        torch.testing.assert_close(
            a.detach(), e.detach(), rtol=RTOL, atol=ATOL, equal_nan=True, msg=lambda m, w=where: f"{w}: {m}"
        )


@dataclass
class Outcome:
    """What a run gave: a value or an error, and where it left the random stream."""

    value: Any = None
    error: BaseException | None = None
    rng: torch.Tensor | None = None


def outcome(thunk, seed=0):
    torch.manual_seed(seed)
    result = Outcome()
    try:
        result.value = thunk()
    except Exception as error:
        result.error = error
    result.rng = torch.get_rng_state()
    return result


def message(error):
    """The text of an error, without what changes from run to run."""
    return re.sub(r"0x[0-9a-f]+", "0x", str(error).splitlines()[0] if str(error) else "")


# What torch says when an operator has no formula for a level; it is another thing to refuse what was asked.
_LACKING = re.compile(
    r"does not support it|not implemented|is not possible because there exists a Tensor `other`"
    r"|must override the setup_context|We do not yet support|unresolved conjugated tensors"
)
# Nothing depends on what is differentiated: remat may give the zeros that this means, and the program fail later.
_CONSTANT = "element 0 of tensors does not require grad"


def assert_same_outcome(actual, expected):
    """The same value and random stream; or, where plain torch raises, the same type and text of error."""
    if "INTERNAL ASSERT FAILED" in str(expected.error):
        return  # torch says that it is its own bug: nothing to compare with
    if _CONSTANT in str(expected.error):
        return
    if expected.error is not None and actual.error is None and _LACKING.search(str(expected.error)):
        return  # the order of remat's levels need not ask for a formula that torch lacks
    if expected.error is not None:
        assert actual.error is not None, (
            f"plain torch raises {type(expected.error).__name__}: {message(expected.error)}; "
            "with remat it returned"
        )
        same = type(actual.error) is type(expected.error) and (
            message(actual.error) == message(expected.error)
            # Written in place to what is broadcast: which of the two is said depends on the levels.
            or ("broadcast shape" in str(expected.error) and "single memory location" in str(actual.error))
        )
        if not same:
            raise AssertionError(
                f"another error than plain torch's\n"
                f"plain: {type(expected.error).__name__}: {expected.error}\n"
                f"remat: {type(actual.error).__name__}: {actual.error}"
            ) from actual.error
        return
    if actual.error is not None:
        raise actual.error
    assert_same(actual.value, expected.value)
    assert torch.equal(actual.rng, expected.rng), "the random stream ends elsewhere than without remat"


class Changing:
    """Gives its outputs in turn: one a call."""

    def __init__(self, *bodies):
        # An iterator is not put back for a recomputation, as a number would be.
        self.bodies, self.calls = bodies, itertools.count()

    def __call__(self, *args):
        return self.bodies[min(next(self.calls), len(self.bodies) - 1)](*args)


class Counter:
    """Wraps f and counts how often it is entered: `calls` since the last `reset`.

    The count is in an object of C, which is the same one in a recomputation.
    """

    def __init__(self, f):
        self.f = f
        self.entered = queue.SimpleQueue()

    @property
    def calls(self):
        return self.entered.qsize()

    def reset(self):
        while not self.entered.empty():
            self.entered.get()

    def __call__(self, *args, **kwargs):
        self.entered.put(None)
        return self.f(*args, **kwargs)


def tensor_bytes(*trees):
    """Bytes of the distinct storages in some trees."""
    storages = {}
    for leaf in pytree.tree_leaves(trees):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Storages(TorchDispatchMode):
    """Live bytes of the storages born inside the block, seen below functorch: `live` now and `peak` so far.

    It shares no code with `funcckpt.meter`, so that the tests do not measure with what they test.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = {}
        # Kept alive: the address of a storage that died may be given to a new one.
        self._before = []

    def known(self, *trees):
        """Storages that existed before: not counted."""
        for leaf in pytree.tree_leaves(trees):
            if isinstance(leaf, torch.Tensor):
                self._before.append(leaf.untyped_storage())
                self._known[self._before[-1]._cdata] = 0
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known[key] = size
                    self.live += size
                    weakref.finalize(storage, self._died, key)
        self.peak = max(self.peak, self.live)
        return out

    def _died(self, key):
        self.live -= self._known.pop(key)
