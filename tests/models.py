"""Models of others, with random weights, built offline. They need the extra `models`.

Each builder gives a model of so many blocks and the function that makes its per-sample loss and a batch.
"""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call

from funcckpt.meter import mark

SAMPLES, WIDTH = 3, 32


@functools.cache
def torchvision():
    """torchvision, which timm and transformers import too. Its wheel is built for CUDA, and finds no operators
    on a torch that is not: two that are not used here, but expected at import, are declared then.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    try:
        import torchvision as module
    except ImportError:
        pytest.skip("needs the extra `models`")
    except RuntimeError:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision as module
    module._declared = library  # which takes its operators along
    return module


def library_of_models(name):
    torchvision()
    return pytest.importorskip(name, reason="needs the extra `models`")


def of_transformers(config, model, **options):
    """A small model with dropout. `use_cache=False`: a cache would store tensors of the blocks."""
    transformers = library_of_models("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**options)), tokens


def gpt2(depth=4, use_cache=False):
    return of_transformers(
        "GPT2Config", "GPT2LMHeadModel", vocab_size=61, n_positions=32, n_embd=WIDTH, n_layer=depth, n_head=4,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager", use_cache=use_cache,
    )  # fmt: skip


SIZES = dict(hidden_size=WIDTH, intermediate_size=64, num_attention_heads=4)


def llama(depth=4):
    return of_transformers(
        "LlamaConfig", "LlamaForCausalLM", vocab_size=61, max_position_embeddings=32, num_hidden_layers=depth,
        attention_dropout=0.1, attn_implementation="eager", use_cache=False, **SIZES,
    )  # fmt: skip


def t5(depth=4):
    return of_transformers(
        "T5Config", "T5ForConditionalGeneration", vocab_size=61, d_model=WIDTH, d_kv=8, d_ff=64, num_heads=4,
        num_layers=depth, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip


def lora(depth=4):
    peft = library_of_models("peft")
    model, _ = llama(depth)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)  # zeros otherwise, and so are the gradients of lora_A
    return model, tokens


def resnet(depth=6):
    timm = library_of_models("timm")
    model = timm.models.ResNet(
        timm.models.resnet.BasicBlock, layers=(depth, 1, 1, 1), channels=(16,) * 4, num_classes=7,
        norm_layer=lambda channels, **_: nn.GroupNorm(4, channels),
    )  # fmt: skip
    return model, images


def vision_transformer(depth=4):
    timm = library_of_models("timm")
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=8, depth=depth, embed_dim=WIDTH,
        num_heads=2, num_classes=7, proj_drop_rate=0.1, drop_path_rate=0.0,
    )  # fmt: skip
    return model, images


def densenet(depth=4):
    model = torchvision().models.DenseNet(
        growth_rate=8, block_config=(depth, depth), num_init_features=16, drop_rate=0.1, num_classes=7
    )
    # vmap cannot write the running statistics of all samples to one tensor.
    return torch.func.replace_all_batch_norm_modules_(model), images


# What `apply_remat` is to select.
BLOCKS = {
    gpt2: "GradientCheckpointingLayer",
    llama: "model.layers.*",
    t5: "GradientCheckpointingLayer",
    lora: "*.layers.*",
    vision_transformer: "blocks.*",
    resnet: "BasicBlock",
    densenet: "features.denseblock*.denselayer*",
}


def tokens(model, parameters, buffers):
    ids = torch.randint(0, 61, (SAMPLES, 16), generator=torch.Generator().manual_seed(1))

    def loss(parameters, ids):
        ids = ids[None]
        out = functional_call(model, (parameters, buffers), (), {"input_ids": ids, "labels": ids})
        mark("saved")
        return nn.functional.cross_entropy(out.logits[0, :-1].double(), ids[0, 1:])

    return loss, ids


def images(model, parameters, buffers):
    xs = torch.randn(SAMPLES, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    def loss(parameters, x):
        out = functional_call(model, (parameters, buffers), (x[None].to(next(model.parameters()).dtype),))
        logits = getattr(out, "logits", out)
        mark("saved")
        return nn.functional.cross_entropy(logits, torch.zeros(1, dtype=torch.long))

    return loss, xs


def enable(model, use_reentrant=False):
    """Checkpointing as the model's own library has it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        model.disable_input_require_grads()
    else:
        _switch(model, True)


def disable(model):
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        _switch(model, False)


def _switch(model, on):
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(on)
    for layer in model.modules():
        if hasattr(layer, "memory_efficient"):  # densenet
            layer.memory_efficient = on


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
