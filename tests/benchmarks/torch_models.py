"""Small models for the benchmarks. Each is a module that puts its blocks through `wrap`, where recomputation
comes in; inputs have a batch dimension first, and all parameters are those of layers that Opacus knows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Wrap = Callable[[Callable], Callable]


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [self.split(y) for y in self.qkv(self.norm1(x)).chunk(3, -1)]
        # Spelled out because vmap has no rule for the fused attention on a CPU.
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + self.merge(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """A causal language model, as GPT-2, without positions."""

    def __init__(self, wrap: Wrap, vocabulary: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.wrap = wrap
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([TransformerBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.wrap(block)(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + (x if self.short is None else self.short(x))).relu()


class ResNet18(nn.Module):
    """ResNet-18 with its stem for small images, and group norms, which do not mix samples."""

    def __init__(self, wrap: Wrap, width: int, classes: int) -> None:
        super().__init__()
        self.wrap = wrap
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(4, width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        stages = [
            [ResidualBlock(a, b, 1 if a == b else 2), ResidualBlock(b, b, 1)]
            for a, b in itertools.pairwise(widths)
        ]
        self.blocks = nn.ModuleList([block for stage in stages for block in stage])
        self.head = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.stem(images)).relu()
        for block in self.blocks:
            x = self.wrap(block)(x)
        return self.head(x.mean((2, 3)))


class GRU(nn.Module):
    """A byte-level GRU, of whose steps `segment` at a time go through `wrap`."""

    def __init__(self, wrap: Wrap, vocabulary: int, width: int, segment: int) -> None:
        super().__init__()
        self.wrap, self.segment = wrap, segment
        self.embedding = nn.Embedding(vocabulary, width)
        self.input, self.hidden = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        h, parts = torch.zeros_like(x[:, 0]), []
        for part in x.split(self.segment, 1):
            h, y = self.wrap(self.steps)(h, part)
            parts.append(y)
        return self.head(torch.cat(parts, 1))

    def steps(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        states = []
        for step in x.unbind(1):
            (r1, z1, n1), (r2, z2, n2) = self.input(step).chunk(3, -1), self.hidden(h).chunk(3, -1)
            z = torch.sigmoid(z1 + z2)
            h = (1 - z) * torch.tanh(n1 + torch.sigmoid(r1 + r2) * n2) + z * h
            states.append(h)
        return h, torch.stack(states, 1)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of one sample with a batch dimension of 1, or the sum over a batch; the mean over positions."""
    positions = max(1, targets[0].numel())
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum") / positions


class Shape(NamedTuple):
    """Sizes of the model; `width` is a multiple of `heads`."""

    layers: int
    width: int
    heads: int
    context: int


def init(shape: Shape, *, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    layers, width, heads, context = shape
    residual = 1 / math.sqrt(2 * layers)  # The stream's variance is the sum over layers.
    one, ones = 1 / math.sqrt(width), torch.ones(width, dtype=dtype)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=dtype) * std

    def block_parameters() -> dict[str, Tensor]:
        return {
            "attention_norm": ones.clone(),
            "qkv": normal(3, heads, width, width // heads, std=one),
            "merge": normal(width, width, std=residual * one),
            "mlp_norm": ones.clone(),
            "up": normal(width, 4 * width, std=one),
            "down": normal(4 * width, width, std=residual * one / 2),
        }

    ends = {"embedding": normal(256, width, std=1.0), "position": normal(context, width, std=0.1)}
    blocks = [block_parameters() for _ in range(layers)]
    return {**ends, "blocks": blocks, "norm": ones, "unembedding": normal(width, 256, std=one)}


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One transformer block: ``(context, width)`` to the same."""
    context, width = x.shape
    q, k, v = F.rms_norm(x, (width,), p["attention_norm"]) @ p["qkv"]  # (3, heads, context, size)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(context, context, dtype=torch.bool, device=x.device).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    x = x + mixed.transpose(0, 1).reshape(context, width) @ p["merge"]
    return x + F.gelu(F.rms_norm(x, (width,), p["mlp_norm"]) @ p["up"]) @ p["down"]


def loss_with(wrap: Wrap) -> Callable[..., Tensor]:
    """The mean cross-entropy of one sequence, each block put through `wrap`."""
    wrapped = wrap(block)

    def loss(parameters: dict[str, Any], inputs: Tensor, targets: Tensor) -> Tensor:
        x = parameters["embedding"][inputs] + parameters["position"]
        for p in parameters["blocks"]:
            x = wrapped(p, x)
        x = F.rms_norm(x, x.shape[-1:], parameters["norm"])
        return F.cross_entropy(x @ parameters["unembedding"], targets)

    return loss
