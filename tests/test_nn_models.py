"""Models of others, with `apply_remat` and with checkpoint calls of their own under `patched`."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from models import BLOCKS, disable, enable, gpt2, llama, trained, vision_transformer
from torch.func import grad, vmap

from funcckpt import EscapeError, TransformError, explain, patched
from funcckpt.meter import measure
from funcckpt.nn import apply_remat

pytestmark = [
    # peft calls transformers by names of before.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
    pytest.mark.filterwarnings("ignore:funcckpt.checkpoint treats use_reentrant=True:UserWarning"),
]
close = lambda a, e: torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)


def built(build, **sizes):
    torch.manual_seed(0)
    model, make = build(**sizes)
    return model.train().double(), make


def per_sample(model, make):
    """Per-sample gradients of what is trained, the state of the random stream after them, and the bytes."""
    parameters = {k: p.detach() for k, p in trained(model).items()}
    loss, batch = make(model, parameters, dict(model.named_buffers()))
    torch.manual_seed(2)
    measured = measure(vmap(grad(loss), (None, 0), randomness="different"), parameters, batch)
    return measured.result, torch.rand(3), measured


def backward(model, make):
    parameters = trained(model)
    loss, batch = make(model, parameters, dict(model.named_buffers()))
    torch.manual_seed(2)
    gradients = torch.autograd.grad(loss(parameters, batch[0]), list(parameters.values()))
    return gradients, torch.rand(3)


def assert_as_without(model, make, wrapped, context):
    for run in (backward, per_sample):
        expected = run(model, make)
        with context():
            found = run(wrapped, make)
        close(found[:2], expected[:2])
    return found[2].peak_bytes / expected[2].peak_bytes


@pytest.mark.parametrize("build", BLOCKS, ids=lambda f: f.__name__)
def test_apply_remat(build):
    plain, make = built(build)
    wrapped = apply_remat(copy.deepcopy(plain), BLOCKS[build])
    assert assert_as_without(plain, make, wrapped, nullcontext) < 0.8


@pytest.mark.parametrize(
    "build, use_reentrant",
    [(build, False) for build in BLOCKS] + [(gpt2, True), (llama, True)],
    ids=lambda case: getattr(case, "__name__", {True: "reentrant", False: ""}.get(case)),
)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_patched(build, train, use_reentrant):
    plain, make = built(build)
    model = copy.deepcopy(plain)
    enable(model, use_reentrant)  # in transformers it checkpoints in training only
    plain.train(train), model.train(train)
    if train:
        with pytest.raises(RuntimeError):
            per_sample(model, make)
    assert assert_as_without(plain, make, model, patched) < (0.8 if train else 1.01)
    disable(model)


def test_what_is_named():
    model, make = built(gpt2, use_cache=True)
    apply_remat(model, BLOCKS[gpt2])
    with pytest.raises(EscapeError, match=r"GPT2Block.*attribute 'keys'.*use_cache=False"):
        per_sample(model, make)
    model, make = built(gpt2)
    model.activation_checkpointing_enable()
    with pytest.raises(TransformError, match=r"model\.disable_input_require_grads\(\)"), patched():
        per_sample(model, make)


@pytest.mark.parametrize(
    "build, name",
    [(gpt2, "GPT2Block.forward"), (vision_transformer, "forward of Block")],
    ids=["gpt2", "timm"],
)
def test_explain_names_the_block(build, name):
    model, make = built(build)
    enable(model)
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    loss, batch = make(model, parameters, {})
    with patched():
        (site,) = explain(vmap(grad(loss), (None, 0), randomness="different"), parameters, batch).sites
        (eager,) = explain(lambda: loss(dict(model.named_parameters()), batch[0])).sites
    assert site.calls == eager.calls == 4
    assert all(re.fullmatch(rf"(remat|checkpoint)\(.*{name}\)", found.name) for found in (site, eager))
