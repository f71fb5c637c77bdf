"""The main job, through its command and as a function."""

import subprocess
import sys

import pytest
import torch
from support import assert_same

from funcckpt.__main__ import job, main
from funcckpt.meter import measure

TINY = {"layers": 6, "width": 16, "heads": 2, "context": 24, "batch": 3}


def measured(remat, **sizes):
    run = job(**{**TINY, **sizes}, remat=remat)
    run()
    return measure(run)


def test_remat_gives_the_same_gradients_in_less_memory():
    plain, remat = measured(False), measured(True)
    assert_same(remat.result, plain.result)
    assert max(g.abs().max() for g in plain.result.values()) > 1e-3
    assert {len(g) for g in plain.result.values()} == {TINY["batch"]}
    assert sum(g.nbytes for g in plain.result.values()) < remat.peak_bytes < 0.75 * plain.peak_bytes
    assert remat.marks["saved"] < 0.25 * plain.marks["saved"]


def test_remat_saves_the_inputs_of_the_blocks_alone():
    """One more block is one more input held, and one more forward of the block."""
    (less_plain, less), (more_plain, more) = [
        [measured(remat, layers=n) for remat in (False, True)] for n in (2, 3)
    ]
    context, width = TINY["context"], TINY["width"]
    assert more.marks["saved"] - less.marks["saved"] == 4 * 3 * context * width
    # A block's weights make a product each, forward, and two backward; so do q @ k.T and its @ v.
    forward = 2 * 3 * (12 * context * width**2 + 2 * context**2 * width)
    assert more_plain.flops - less_plain.flops == 3 * forward
    assert 0.5 * forward < more.flops - less.flops - 3 * forward <= forward


def test_the_command():
    options = [f"--{name}={size}" for name, size in TINY.items()]
    command = [sys.executable, "-m", "funcckpt", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "6 layers of width 16, 3 sequences of 24 bytes" in done.stdout
    for row in ["peak live bytes", "saved bytes", "FLOPs"]:
        assert sum(line.startswith(row) for line in done.stdout.splitlines()) == 1
    assert f"torch {torch.__version__}" in done.stdout


def test_a_bad_option_is_told_in_the_last_line(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--layers", "many"])
    assert exit.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m funcckpt: error: argument --layers: ")
