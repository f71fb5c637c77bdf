"""What the tests of the hook path share: the checkpoints that one test is run with, leaves, operators."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.utils.checkpoint
from oracles import F64 as D
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

leaf = lambda *shape: torch.randn(*shape, dtype=D, requires_grad=True)


def plain(f, *args, **options):
    """The reference: no checkpoint."""
    return f(*args)


def theirs(f, *args, **kwargs):
    return torch.utils.checkpoint.checkpoint(f, *args, **{"use_reentrant": False, **kwargs})


def copying():
    """Hooks as `save_on_cpu` has on a GPU; on a CPU it keeps the tensor itself, in a cycle (torch 2.13)."""
    return saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)


def in_a_thread(f, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f, *args).result()


class Ops(TorchDispatchMode):
    """The operators that are run."""

    def __init__(self):
        super().__init__()
        self._calls = []

    @property
    def names(self):
        return [func.overloadpacket.__name__ for func in self._calls]

    @property
    def count(self):
        return Counter(self._calls)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._calls.append(func)
        return func(*args, **(kwargs or {}))
