"""What every test of funcckpt can count on: one thread, a fixed seed, and nothing left behind by
the test before.
"""

import pytest
import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from funcckpt.tape import recompute

torch.set_num_threads(1)
# torch's own test utilities, whose database of modules is used here, forbid flags that Opacus sets.
torch.backends.disable_global_flags = lambda: None


@pytest.fixture(autouse=True)
def state_intact():
    """Seed before the test; after it every level, mode and default of torch must be as it was."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    yield
    assert peek_interpreter_stack() is None, "a functorch level was left on the stack"
    assert forward_ad._current_level == -1, "a forward AD level was left open"
    assert torch.is_grad_enabled(), "grad mode was left off"
    assert not torch.is_inference_mode_enabled(), "inference mode was left on"
    assert not torch.is_autocast_enabled("cpu"), "autocast was left on"
    assert torch.get_default_dtype() == before, "the default dtype was changed"
    assert torch._C._len_torch_dispatch_stack() == 0, "a TorchDispatchMode was left on"
    assert torch._C._len_torch_function_stack() == 0, "a TorchFunctionMode was left on"


@pytest.fixture(autouse=True)
def recomputations_fail_aloud(monkeypatch):
    """What a recomputation leaves out, or is handed, must not be the cause of an error. Unless it asks for
    memory that is not there, or torch's own assertion fails, the rerun in full would hide a bug.
    """

    def blame(error):
        if not isinstance(error, recompute.Redo) and not any(words in str(error) for words in NOT_OURS):
            raise AssertionError("only the full recomputation was right") from error

    monkeypatch.setattr(recompute, "_blame", blame)


NOT_OURS = (
    "Cannot access data pointer",
    "is not supported for tensor subclasses",
    "has_fw_view() INTERNAL ASSERT FAILED",  # svd_lowrank in forward mode over reverse mode
)
