"""The main job, through its command and as a function."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.func import grad, vmap
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from funcckpt.__main__ import Report, compare, main, own_sources
from funcckpt.demo.language_model import BYTES, Shape, init, loss_with, sample
from funcckpt.remat import remat

TINY = Shape(layers=6, width=16, heads=2, context=24)
TINY_OPTIONS = ["--layers=6", "--width=16", "--heads=2", "--context=24", "--batch=3"]
TEXT = bytes(range(256)) * 4


@pytest.fixture(scope="module")
def report() -> Report:
    return compare(TEXT, TINY, batch=3, dtype=torch.float64, repeat=1)


def test_gradients_are_the_same(report: Report):
    assert report.max_gradient > 1e-3
    assert report.max_difference < 1e-12


def test_remat_takes_less_memory(report: Report):
    parameters = TINY.layers * 12 * TINY.width**2 + (2 * TINY.layers + 1) * TINY.width
    parameters += (2 * BYTES + TINY.context) * TINY.width
    assert report.parameters == parameters
    assert report.gradient_bytes == 8 * 3 * parameters
    assert report.gradient_bytes < report.remat.peak_bytes < 0.75 * report.plain.peak_bytes
    assert report.remat.saved_bytes < 0.25 * report.plain.saved_bytes


def test_remat_saves_the_blocks_inputs_alone():
    """One more block is one more input held, and one more forward of the block."""
    less, more = (
        compare(TEXT, replace(TINY, layers=n), batch=3, dtype=torch.float64, repeat=1) for n in (2, 3)
    )
    stream = 8 * 3 * TINY.context * TINY.width
    assert more.remat.saved_bytes - less.remat.saved_bytes == stream
    # A block's weights make a product each, forward, and two backward; so do q @ k.T and its @ v.
    forward = 2 * 3 * (12 * TINY.context * TINY.width**2 + 2 * TINY.context**2 * TINY.width)
    assert more.plain.flops - less.plain.flops == 3 * forward
    recomputed = more.remat.flops - less.remat.flops - 3 * forward
    assert 0.5 * forward < recomputed <= forward


def torch_refuses() -> str:
    """What torch.utils.checkpoint says to `vmap(grad(...))`, in this release."""
    with pytest.raises(RuntimeError) as raised:
        vmap(grad(lambda x: checkpoint(torch.sin, x, use_reentrant=False)))(torch.ones(2))
    return f"RuntimeError: {str(raised.value).splitlines()[0]}"


def test_torch_checkpoint_raises_and_its_message_is_shown(report: Report):
    assert report.torch_checkpoint == torch_refuses()
    assert "\n" not in report.torch_checkpoint


def test_per_sample_gradients_are_those_of_the_samples():
    generator = torch.Generator().manual_seed(0)
    parameters = init(TINY, generator=generator, dtype=torch.float64)
    inputs, targets = sample(TEXT, batch=3, context=TINY.context, generator=generator)
    batched = vmap(grad(loss_with(remat)), (None, 0, 0))(parameters, inputs, targets)
    leaves, tree = pytree.tree_flatten(parameters)
    for i in range(3):
        wanted = [x.clone().requires_grad_() for x in leaves]
        loss = loss_with(lambda block: block)(pytree.tree_unflatten(wanted, tree), inputs[i], targets[i])
        loss.backward()
        for found, leaf in zip(pytree.tree_leaves(batched), wanted, strict=True):
            torch.testing.assert_close(found[i], leaf.grad)


def test_the_model_is_causal_and_starts_near_ignorance():
    generator = torch.Generator().manual_seed(0)
    parameters = init(TINY, generator=generator, dtype=torch.float64)
    (inputs,), (targets,) = sample(TEXT, batch=1, context=TINY.context, generator=generator)
    loss = loss_with(lambda block: block)

    def first_byte_loss(last: int) -> torch.Tensor:
        changed = inputs.clone()
        changed[-1] = last
        # All targets but one are ignored by cross_entropy, whose mean is then over the first alone.
        return loss(parameters, changed, torch.where(torch.arange(24) == 0, targets, -100))

    assert first_byte_loss(0) == first_byte_loss(200)
    assert abs(loss(parameters, inputs, targets).item() - math.log(BYTES)) < 1.5


def test_samples_are_windows_of_the_text():
    text = own_sources()
    generator = torch.Generator().manual_seed(0)
    inputs, targets = sample(text, batch=5, context=100, generator=generator)
    assert inputs.shape == targets.shape == (5, 100)
    for x, y in zip(inputs, targets, strict=True):
        assert bytes([*x.tolist(), y[-1]]) in text
        assert torch.equal(x[1:], y[:-1])
    # The only window that a text of context + 1 bytes has.
    inputs, targets = sample(b"abc", batch=2, context=2, generator=generator)
    assert inputs.tolist() == [[97, 98]] * 2
    assert targets.tolist() == [[98, 99]] * 2


def test_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "funcckpt", *TINY_OPTIONS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert f"3 sequences of 24 bytes from {len(own_sources()):,} bytes of text" in done.stdout
    for row in ["peak live bytes", "saved bytes", "FLOPs", "time"]:
        assert sum(line.startswith(row) for line in done.stdout.splitlines()) == 1
    assert torch_refuses() in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30"], "--width 30 is not divisible by --heads 4"),
        (["--layers", "many"], "argument --layers: "),
    ],
)
def test_bad_options_are_told_in_the_last_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m funcckpt: error: {message}")
