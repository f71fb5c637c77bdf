"""Models of others, with checkpoint calls of their own, under per-sample gradients."""

import re

import pytest
import torch
from models import BLOCKS, SAMPLES, WIDTH, adapt, disable, enable, gpt2, llama, trained, vision_transformer
from support import Storages, tensor_bytes
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from funcckpt import TransformError, explain, patched

pytestmark = [
    # peft calls transformers by names of before.
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
]
MODELS = [*BLOCKS]


@pytest.mark.parametrize(
    "build, use_reentrant",
    [(build, False) for build in MODELS] + [(gpt2, True), (llama, True)],
    ids=lambda case: getattr(case, "__name__", {True: "reentrant", False: ""}.get(case)),
)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_per_sample_gradients(build, train, use_reentrant):
    torch.manual_seed(0)
    model, make = build()
    model.train(train).double()
    parameters = {k: p.detach() for k, p in trained(model).items()}
    buffers = dict(model.named_buffers())
    loss, batch = make(model, parameters, buffers)
    per_sample = vmap(grad(loss), (None, 0), randomness="different")

    def run():
        torch.manual_seed(2)
        with Storages().known(parameters, buffers, batch) as storages:
            gradients = per_sample(parameters, batch)
        return gradients, torch.rand(3), storages.peak

    plain, after, plain_peak = run()
    model.train()  # transformers checkpoints in training only
    enable(model, use_reentrant)
    model.train(train)
    if train:
        with pytest.raises(RuntimeError):
            run()
    with patched():
        gradients, after_again, peak = run()
    disable(model)
    for (name, actual), expected in zip(gradients.items(), plain.values()):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(after, after_again)
    print(
        f"{build.__name__}: peak {plain_peak:,} bytes without, {peak:,} with checkpoints; "
        f"gradients {tensor_bytes(plain):,}"
    )
    if train:
        assert peak < 0.8 * plain_peak


def test_the_hook_of_the_switch_is_named():
    model, make = gpt2()
    model.train().activation_checkpointing_enable()
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    loss, batch = make(model, parameters, {})
    with pytest.raises(TransformError, match=r"model\.disable_input_require_grads\(\)"), patched():
        vmap(grad(loss), (None, 0), randomness="different")(parameters, batch)


@pytest.mark.parametrize(
    "build, name",
    [(gpt2, "GPT2Block.forward"), (vision_transformer, "forward of Block")],
    ids=["gpt2", "timm"],
)
def test_explain_names_the_block(build, name):
    model, make = build()
    enable(model.train())
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    loss, batch = make(model, parameters, {})
    with patched():
        (site,) = explain(vmap(grad(loss), (None, 0), randomness="different"), parameters, batch).sites
        (eager,) = explain(lambda: loss(dict(model.named_parameters()), batch[0])).sites
    assert site.calls == eager.calls == 4
    assert all(re.fullmatch(rf"(remat|checkpoint)\(.*{name}\)", found.name) for found in (site, eager))


@pytest.mark.parametrize("build", MODELS, ids=lambda f: f.__name__)
def test_plain_backward(build):
    torch.manual_seed(0)
    model, make = build()
    model.train().double()
    parameters = trained(model)
    loss, batch = make(model, parameters, dict(model.named_buffers()))

    def run():
        torch.manual_seed(2)
        return torch.autograd.grad(loss(parameters, batch[0]), list(parameters.values()))

    plain = run()
    enable(model)
    with patched():
        actual = run()
    pytree.tree_map(lambda a, e: torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12), actual, plain)


# -- adapters in a frozen model ---------------------------------------------------------------------------


def adapted(build, depth=4):
    torch.manual_seed(0)
    model, make = build(depth)
    adapt(model).train().double()
    parameters = trained(model)
    assert parameters
    loss, batch = make(model, parameters, dict(model.named_buffers()))
    return model, parameters, loss, batch


@pytest.mark.parametrize("build, tokens", [(llama, 16), (vision_transformer, 17)], ids=["llama", "vit"])
def test_frozen_parameters_cost_nothing(build, tokens):
    """Per-sample gradients of the adapters: each block more costs the bytes of its input, and no other."""
    peaks = []
    for depth in (2, 6):
        model, parameters, loss, batch = adapted(build, depth)
        parameters = {name: p.detach() for name, p in parameters.items()}
        enable(model)
        known = (dict(model.named_parameters()), dict(model.named_buffers()), batch)
        with patched(), Storages().known(*known) as storages:
            gradients = vmap(grad(loss), (None, 0), randomness="different")(parameters, batch)
            assert storages.live == tensor_bytes(gradients)
        peaks.append(storages.peak)
    assert peaks[1] - peaks[0] == 4 * (SAMPLES * tokens * WIDTH * 8)


def test_adapters_below_inputs_that_need_no_gradient():
    """Torch's reentrant checkpoint gives none there, with a warning; transformers has a hook against it."""
    model, parameters, loss, batch = adapted(llama)

    def run():
        torch.manual_seed(2)
        return torch.autograd.grad(loss(parameters, batch[0]), list(parameters.values()))

    plain = run()
    with patched():
        enable(model, use_reentrant=False)
        torch.testing.assert_close(run(), plain, rtol=1e-9, atol=1e-12)
        enable(model, use_reentrant=True)
        torch.testing.assert_close(run(), plain, rtol=1e-9, atol=1e-12)
