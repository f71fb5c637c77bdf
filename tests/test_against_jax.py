"""The policies of JAX keep the same values of the same blocks: which products, and which names."""

import re
from collections import Counter

import pytest
import torch

from funcckpt import checkpoint_name, policies, remat, saved_residuals

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')
jnp = pytest.importorskip("jax.numpy")
ad_checkpoint = pytest.importorskip("jax.ad_checkpoint")
named = ad_checkpoint.checkpoint_name

N, D, H, HID = 6, 8, 2, 16


class Mlp:
    shapes = (N, D), (D, HID), (HID, D)

    @staticmethod
    def in_torch(x, w1, w2):
        z = checkpoint_name(x @ w1, "z")
        return x + checkpoint_name(torch.tanh(z), "activated") @ w2

    @staticmethod
    def in_jax(x, w1, w2):
        z = named(x @ w1, "z")
        return x + named(jnp.tanh(z), "activated") @ w2


class Attention:
    shapes = (N, D), (H, D, D // H), (H, D, D // H), (H, D, D // H), (D, D)

    @staticmethod
    def in_torch(x, wq, wk, wv, wo):
        q, k, v = [torch.bmm(x.expand(H, N, D), w) for w in (wq, wk, wv)]
        p = checkpoint_name(torch.softmax(torch.bmm(q, k.mT), -1), "p")
        out = torch.bmm(p, v).transpose(0, 1).reshape(N, D)
        return x + checkpoint_name(torch.sin(out @ wo), "out") ** 3

    @staticmethod
    def in_jax(x, wq, wk, wv, wo):
        q, k, v = [jnp.broadcast_to(x, (H, N, D)) @ w for w in (wq, wk, wv)]
        p = named(jax.nn.softmax(q @ k.mT, -1), "p")
        out = (p @ v).transpose(1, 0, 2).reshape(N, D)
        return x + named(jnp.sin(out @ wo), "out") ** 3


NAMES = "z", "p"
# For both: whatever has these names is a policy, or makes one.
POLICIES = {
    "nothing": lambda p: p.nothing_saveable,
    "dots": lambda p: p.dots_saveable,
    "products": lambda p: p.dots_with_no_batch_dims_saveable,
    "names": lambda p: p.save_only_these_names(*NAMES),
    "other names": lambda p: p.save_only_these_names("activated", "out"),
    "but": lambda p: p.save_any_names_but_these(*NAMES),
    "both": lambda p: p.save_from_both_policies(
        p.dots_with_no_batch_dims_saveable, p.save_only_these_names("p")
    ),
    "offload": lambda p: p.save_and_offload_only_these_names(
        names_which_can_be_saved=["p"],
        names_which_can_be_offloaded=["z"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def kept_by_torch(block, policy):
    """Of what is kept beside the inputs: the shapes of all of it, those of products, and the names."""
    f = remat(block.in_torch, policy=POLICIES[policy](policies))
    kept = [r for r in saved_residuals(f, *[torch.ones(s) for s in block.shapes]) if r.kind == "output"]
    products = Counter(r.shape for r in kept if "mm" in r.source)
    return Counter(r.shape for r in kept), products, {r.name for r in kept} - {None}


def kept_by_jax(block, policy, capsys):
    f = jax.checkpoint(block.in_jax, policy=POLICIES[policy](jax.checkpoint_policies))
    capsys.readouterr()
    ad_checkpoint.print_saved_residuals(f, *[jnp.ones(s) for s in block.shapes])
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    form = r"f32(?:<host>)?\[(.*?)\] (?:named '(.*?)'|output of (\w+))"
    kept = [re.match(form, line).groups() for line in lines]
    kept = [(tuple(map(int, shape.split(","))), name, operator) for shape, name, operator in kept]
    products = [shape for shape, _, op in kept if op == "dot_general"]
    return Counter(shape for shape, *_ in kept), Counter(products), {name for _, name, _ in kept} - {None}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_is_kept(policy, capsys):
    found = []
    for block in (Mlp, Attention):
        (shapes, products, names), theirs = kept_by_torch(block, policy), kept_by_jax(block, policy, capsys)
        assert shapes == theirs[0], block
        # Ours of a product that has a name tells both.
        assert products >= theirs[1] and names >= theirs[2], block
        found += shapes
    assert bool(found) == (policy != "nothing")
