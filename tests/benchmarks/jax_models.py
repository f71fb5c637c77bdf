"""The models of `models` in JAX: functions of the same parameters, under the same names, and one sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Parameters = dict[str, Any]


def linear(p: Parameters, name: str, x: Any) -> Any:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def layer_norm(p: Parameters, name: str, x: Any) -> Any:
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return y * p[f"{name}.weight"] + p[f"{name}.bias"]


def conv(p: Parameters, name: str, x: Any, stride: int = 1) -> Any:
    w = p[f"{name}.weight"]
    pad = w.shape[-1] // 2
    return jax.lax.conv_general_dilated(x[None], w, (stride, stride), [(pad, pad)] * 2)[0]


def group_norm(p: Parameters, name: str, x: Any) -> Any:
    y = x.reshape(4, -1)
    y = ((y - y.mean(1, keepdims=True)) * jax.lax.rsqrt(y.var(1, keepdims=True) + 1e-5)).reshape(x.shape)
    return y * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


def part(p: Parameters, prefix: str) -> Parameters:
    return {name[len(prefix) :]: x for name, x in p.items() if name.startswith(prefix)}


def block_numbers(p: Parameters) -> range:
    return range(1 + max(int(name.split(".")[1]) for name in p if name.startswith("blocks.")))


def transformer_block(heads: int) -> Callable:
    def block(p: Parameters, x: Any) -> Any:
        split = lambda y: y.reshape(len(y), heads, -1).swapaxes(0, 1)
        q, k, v = map(split, jnp.split(linear(p, "qkv", layer_norm(p, "norm1", x)), 3, -1))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        x = x + linear(p, "merge", (jax.nn.softmax(scores) @ v).swapaxes(0, 1).reshape(x.shape))
        return x + linear(p, "down", jax.nn.gelu(linear(p, "up", layer_norm(p, "norm2", x))))

    return block


def transformer(wrap: Callable, heads: int) -> Callable:
    block = wrap(transformer_block(heads))

    def model(p: Parameters, tokens: Any) -> Any:
        x = p["embedding.weight"][tokens]
        for i in block_numbers(p):
            x = block(part(p, f"blocks.{i}."), x)
        return linear(p, "head", layer_norm(p, "norm", x))

    return model


def residual_block(p: Parameters, x: Any) -> Any:
    stride = 2 if "short.weight" in p else 1
    y = jax.nn.relu(group_norm(p, "norm1", conv(p, "conv1", x, stride)))
    y = group_norm(p, "norm2", conv(p, "conv2", y))
    return jax.nn.relu(y + (conv(p, "short", x, stride) if stride == 2 else x))


def resnet18(wrap: Callable) -> Callable:
    block = wrap(residual_block)

    def model(p: Parameters, image: Any) -> Any:
        x = jax.nn.relu(group_norm(p, "norm", conv(p, "stem", image)))
        for i in block_numbers(p):
            x = block(part(p, f"blocks.{i}."), x)
        return linear(p, "head", x.mean((1, 2)))

    return model


def gru(wrap: Callable, segment: int) -> Callable:
    def step(p: Parameters, h: Any, x: Any) -> Any:
        (r1, z1, n1), (r2, z2, n2) = jnp.split(linear(p, "input", x), 3), jnp.split(linear(p, "hidden", h), 3)
        z = jax.nn.sigmoid(z1 + z2)
        h = (1 - z) * jnp.tanh(n1 + jax.nn.sigmoid(r1 + r2) * n2) + z * h
        return h, h

    @wrap
    def steps(p: Parameters, h: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, x: step(p, h, x), h, x)

    def model(p: Parameters, tokens: Any) -> Any:
        x = p["embedding.weight"][tokens]
        h = jnp.zeros(x.shape[1])
        _, y = jax.lax.scan(lambda h, x: steps(p, h, x), h, x.reshape(-1, segment, x.shape[1]))
        return linear(p, "head", y.reshape(x.shape))

    return model


def cross_entropy(outputs: Any, targets: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[..., None], -1).mean()
