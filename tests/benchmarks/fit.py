"""How few FLOPs does `nn.fit` recompute for so many bytes?

    python tests/benchmarks/fit.py

A transformer of 8 blocks and 8 sequences, with `backward()` and with per-sample gradients: nothing recomputed, every
second block, every block, and plans of `fit` for the bytes of these and for parts of the first. Beside them
`torch._functorch.config.activation_memory_budget`, which knows no peak and no transform; its graphs are run as they are,
on real tensors. The summary compares `fit` with all plans of 4 blocks. Bytes and FLOPs are of meta tensors.
"""

import copy
import itertools
from functools import partial

import torch
import torch._functorch.config as config
from common import Benchmark, Job, Methods, main
from torch import nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, gelu

from funcckpt import policies
from funcckpt.meter import measure
from funcckpt.nn import Remat, apply_remat, fit

BUDGETS = 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        # Spelled out, so that it is the same operators on each device.
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-3, -2)
        attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.merge((attention @ v).transpose(-3, -2).flatten(-2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, blocks, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model, parameters, x):
    return cross_entropy(functional_call(model, parameters, (x,)).flatten(0, 1), x.flatten())


def backward(model, x):
    loss_of(model, {}, x).backward()


def per_sample(model, x):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return vmap(grad(lambda p, x: loss_of(model, p, x[None])), (None, 0))(parameters, x)


STEPS = {"backward()": backward, "per-sample gradients": per_sample}


def a_job(depth, toy):
    with torch.device("meta"):
        return Model(depth, 16 if toy else 128), torch.zeros(8, 8 if toy else 64, dtype=torch.long)


def cost(step, model, x):
    for _ in range(2):  # the first recomputation runs what later ones skip
        with torch.device("meta"):
            m = measure(step, copy.deepcopy(model), x)
    return m.peak_bytes, m.flops


def partitioned(model, x, budget):
    """Forward and backward by AOTAutograd, with its budget."""
    real, x = copy.deepcopy(model).to_empty(device="cpu"), torch.zeros_like(x, device="cpu")
    for p in real.parameters():
        nn.init.zeros_(p)
    parameters = dict(real.named_parameters())
    names = list(parameters)

    loss = lambda x, *values: loss_of(real, dict(zip(names, values)), x)
    with config.patch(activation_memory_budget=budget):
        f = aot_function(loss, boxed_nop, boxed_nop, partition_fn=min_cut_rematerialization_partition)
        f(x, *parameters.values()).backward()  # traces
    real.zero_grad()
    m = measure(lambda: f(x, *parameters.values()).backward())
    return m.peak_bytes, m.flops


def deep(name: str, toy: bool) -> Methods:
    step = STEPS[name]
    model, x = a_job(4 if toy else 8, toy)
    wrapped = {
        "nothing": copy.deepcopy(model),
        "every second block": apply_remat(copy.deepcopy(model), "every 2"),
        "every block": apply_remat(copy.deepcopy(model), "layers.*"),
    }
    most, *peaks = [cost(step, model, x)[0] for model in wrapped.values()]
    bytes = {f"bytes of {what}": peak for what, peak in zip([*wrapped][1:], peaks)}
    bytes |= {f"{part} of the bytes": int(part * most) for part in (0.75, 0.5, 0.25)}
    budgets = (1.0, 0.75, 0.5, 0.25, 0.1) if step is backward else ()

    def planned(bytes):
        plan = fit(model, step, x, bytes=bytes)
        return plan.peak_bytes, plan.flops

    costs = {
        **{what: partial(cost, step, m, x) for what, m in wrapped.items()},
        **{f"fit, {what}": partial(planned, n) for what, n in bytes.items()},
        **{f"activation_memory_budget={b}": partial(partitioned, model, x, b) for b in budgets},
    }
    return {what: partial(Job, None, cost) for what, cost in costs.items()}


def against_all_plans(rows):
    """For budgets between the least peak and the one without recomputation: how far plans are from the best."""
    found = {}
    for name, step in STEPS.items():
        model, x = a_job(4, toy=False)
        all_plans = []
        for choices in itertools.product(["keep", None, policies.dots_saveable], repeat=4):
            other = copy.deepcopy(model)
            for layer, choice in zip(other.layers, choices):
                if choice != "keep":
                    Remat(layer, policy=choice)
            all_plans.append(cost(step, other, x))
        least, (most, plain) = min(all_plans)[0], all_plans[0]
        budgets = [least + (most - least) * i // BUDGETS for i in range(BUDGETS)]
        plans = [fit(model, step, x, bytes=bytes) for bytes in budgets]
        best = [min(flops for peak, flops in all_plans if peak <= bytes) for bytes in budgets]
        found[name] = {
            "plans": len(all_plans),
            "budgets": BUDGETS,
            "equal to the best": sum(plan.flops == flops for plan, flops in zip(plans, best)),
            "largest ratio of FLOPs": max(plan.flops / flops for plan, flops in zip(plans, best)),
            "bytes, recomputed by fit, by the best": [
                [n, p.recomputed_flops, b - plain] for n, p, b in zip(budgets, plans, best)
            ],
        }
    return found


BENCHMARKS = {
    "fit": Benchmark({name: partial(deep, name) for name in STEPS}, rounds=0, summary=against_all_plans)
}

if __name__ == "__main__":
    main(__file__, **BENCHMARKS)
