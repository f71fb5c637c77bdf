"""Models of others, with checkpoint calls of their own, under per-sample gradients.

Random weights, built offline. Needs the extra `models`.
"""

import pytest
import torch
from support import Storages, tensor_bytes
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from funcckpt import patched

SAMPLES = 3
pytestmark = [
    # Transformers 5 renames the enabling call.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def torchvision_without_operators():
    """timm and transformers import torchvision, whose wheel is built for CUDA and then finds no operators
    on a torch that is not. They are not used here, but two of them are expected at import.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield
    del library


def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    config = transformers.GPT2Config(
        vocab_size=61,
        n_positions=32,
        n_embd=32,
        n_layer=4,
        n_head=4,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config), tokens


def llama():
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=32,
        attention_dropout=0.1,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), tokens


def vision_transformer():
    timm = pytest.importorskip("timm", reason="needs the extra `models`")
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=8, depth=4, embed_dim=32,
        num_heads=2, num_classes=7, proj_drop_rate=0.1, drop_path_rate=0.0,
    )  # fmt: skip
    return model, images


def mixer():
    timm = pytest.importorskip("timm", reason="needs the extra `models`")
    model = timm.models.MlpMixer(
        num_classes=7, img_size=32, patch_size=8, num_blocks=4, embed_dim=32, proj_drop_rate=0.1
    )
    return model, images


def tokens(model, parameters, buffers):
    ids = torch.randint(0, 61, (SAMPLES, 16), generator=torch.Generator().manual_seed(1))

    def loss(parameters, ids):
        ids = ids[None]
        out = functional_call(model, (parameters, buffers), (), {"input_ids": ids})
        return torch.nn.functional.cross_entropy(out.logits[0, :-1].double(), ids[0, 1:])

    return loss, ids


def images(model, parameters, buffers):
    xs = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def loss(parameters, x):
        logits = functional_call(model, (parameters, buffers), (x[None].to(next(model.parameters()).dtype),))
        return torch.nn.functional.cross_entropy(logits, torch.zeros(1, dtype=torch.long))

    return loss, xs


def enable(model, use_reentrant):
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.disable_input_require_grads()  # its hook calls requires_grad_(), which no transform allows
    else:
        model.set_grad_checkpointing(True)


def disable(model):
    if hasattr(model, "gradient_checkpointing_disable"):
        model.gradient_checkpointing_disable()
    else:
        model.set_grad_checkpointing(False)


@pytest.mark.parametrize("build", [gpt2, llama, vision_transformer, mixer], ids=lambda f: f.__name__)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_per_sample_gradients(build, train, use_reentrant):
    torch.manual_seed(0)
    model, make = build()
    model.train(train).double()
    parameters = {k: p.detach() for k, p in model.named_parameters()}
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


@pytest.mark.parametrize("build", [gpt2, llama, vision_transformer, mixer], ids=lambda f: f.__name__)
def test_plain_backward(build):
    torch.manual_seed(0)
    model, make = build()
    model.train().double()
    parameters = dict(model.named_parameters())
    loss, batch = make(model, parameters, dict(model.named_buffers()))

    def run():
        torch.manual_seed(2)
        return torch.autograd.grad(loss(parameters, batch[0]), list(parameters.values()))

    plain = run()
    enable(model, False)
    with patched():
        actual = run()
    pytree.tree_map(lambda a, e: torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12), actual, plain)
