"""The policies of JAX keep the same values of the same blocks: which products, and which names."""

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from funcckpt import checkpoint_name, policies, remat, saved_residuals

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')
jnp = pytest.importorskip("jax.numpy")
ad_checkpoint = pytest.importorskip("jax.ad_checkpoint")
named = ad_checkpoint.checkpoint_name

N, D, H = 6, 8, 2
SHAPES = (N, D), (N, N, 3), (H, D, D // H), (H, D, D // H), (H, D, D // H), (D, D)


def in_torch(x, w, wq, wk, wv, wo):
    x = torch.sin(checkpoint_name(F.conv1d(x[None], w, padding=1), "c"))[0]
    q, k, v = [torch.bmm(x.expand(H, N, D), w) for w in (wq, wk, wv)]
    p = checkpoint_name(torch.softmax(torch.bmm(q, k.mT), -1), "p")
    out = checkpoint_name(torch.bmm(p, v), "v").transpose(0, 1).reshape(N, D)
    return x + checkpoint_name(torch.sin(out @ wo), "out") ** 3


def in_jax(x, w, wq, wk, wv, wo):
    x = jnp.sin(named(jax.lax.conv_general_dilated(x[None], w, (1,), "SAME"), "c"))[0]
    q, k, v = [jnp.broadcast_to(x, (H, N, D)) @ w for w in (wq, wk, wv)]
    p = named(jax.nn.softmax(q @ k.mT, -1), "p")
    out = named(p @ v, "v").transpose(1, 0, 2).reshape(N, D)
    return x + named(jnp.sin(out @ wo), "out") ** 3


NAMES = "p", "v"
# For both: whatever has these names is a policy, or makes one.
POLICIES = {
    "nothing": lambda p: p.nothing_saveable,
    "dots": lambda p: p.dots_saveable,
    "products": lambda p: p.dots_with_no_batch_dims_saveable,
    "names": lambda p: p.save_only_these_names(*NAMES),
    "other names": lambda p: p.save_only_these_names("out", "c"),
    "but": lambda p: p.save_any_names_but_these(*NAMES),
    "both": lambda p: p.save_from_both_policies(
        p.dots_with_no_batch_dims_saveable, p.save_only_these_names("p")
    ),
    "offload": lambda p: p.save_and_offload_only_these_names(
        names_which_can_be_saved=["p"],
        names_which_can_be_offloaded=["v"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def kept_by_torch(policy):
    """Of what is kept beside the inputs: the shapes of all of it, those of products, and the names."""
    f = remat(in_torch, policy=POLICIES[policy](policies))
    kept = [r for r in saved_residuals(f, *[torch.ones(s) for s in SHAPES]) if r.kind == "output"]
    products = Counter(r.shape for r in kept if re.search("mm|conv", r.source))
    return Counter(r.shape for r in kept), products, {r.name for r in kept} - {None}


def kept_by_jax(policy, capsys):
    f = jax.checkpoint(in_jax, policy=POLICIES[policy](jax.checkpoint_policies))
    capsys.readouterr()
    ad_checkpoint.print_saved_residuals(f, *[jnp.ones(s) for s in SHAPES])
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    form = r"f32(?:<host>)?\[(.*?)\] (?:named '(.*?)'|output of (\w+))"
    kept = [re.match(form, line).groups() for line in lines]
    kept = [(tuple(map(int, shape.split(","))), name, operator) for shape, name, operator in kept]
    products = [shape for shape, _, op in kept if op in ("dot_general", "conv_general_dilated")]
    return Counter(shape for shape, *_ in kept), Counter(products), {name for _, name, _ in kept} - {None}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_is_kept(policy, capsys):
    (shapes, products, names), theirs = kept_by_torch(policy), kept_by_jax(policy, capsys)
    assert shapes == theirs[0] and bool(shapes) == (policy != "nothing")
    # Ours of a product that has a name tells both.
    assert products >= theirs[1] and names >= theirs[2]
