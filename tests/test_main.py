"""The main job, through its command and as a function."""

import json
import subprocess
import sys

import pytest
import torch
from support import assert_same
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from funcckpt.__main__ import job, main, own_sources
from funcckpt.meter import measure

TINY = {"layers": 6, "width": 16, "heads": 2, "context": 24, "batch": 3}
OPTIONS = [f"--{name}={size}" for name, size in TINY.items()]


def measured(method, **sizes):
    run = job(**{**TINY, **sizes}, method=method, text=bytes(range(256)) * 4)
    run()
    return measure(run)


def test_remat_gives_the_same_gradients_in_less_memory():
    plain, remat = measured("plain"), measured("remat")
    assert_same(remat.result, plain.result)
    assert max(g.abs().max() for g in plain.result.values()) > 1e-3
    assert {len(g) for g in plain.result.values()} == {TINY["batch"]}
    assert sum(g.nbytes for g in plain.result.values()) < remat.peak_bytes < 0.75 * plain.peak_bytes
    assert remat.marks["saved"] < 0.25 * plain.marks["saved"]


def test_remat_saves_the_inputs_of_the_blocks_alone():
    """One more block is one more input held, and one more forward of the block."""
    less_plain, more_plain, less, more = [measured(m, layers=n) for m in ("plain", "remat") for n in (2, 3)]
    context, width = TINY["context"], TINY["width"]
    assert more.marks["saved"] - less.marks["saved"] == 4 * 3 * context * width
    # A block's weights make a product each, forward, and two backward; so do q @ k.T and its @ v.
    forward = 2 * 3 * (12 * context * width**2 + 2 * context**2 * width)
    assert more_plain.flops - less_plain.flops == 3 * forward
    assert 0.5 * forward < more.flops - less.flops - 3 * forward <= forward


def torch_refuses():
    """What torch.utils.checkpoint says to `vmap(grad(...))`, in this release."""
    with pytest.raises(RuntimeError) as raised:
        vmap(grad(lambda x: checkpoint(torch.sin, x, use_reentrant=False)))(torch.ones(2))
    return f"RuntimeError: {str(raised.value).splitlines()[0]}"


def test_json_of_the_command():
    command = [sys.executable, "-m", "funcckpt", "--json", *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.items() >= {**TINY, "device": "cpu", "version": torch.__version__}.items()
    assert report["remat"]["peak_bytes"] < 0.75 * report["plain"]["peak_bytes"]
    assert report["remat"]["seconds"] > 0
    assert report["difference"] < 1e-5
    assert report["torch"] == torch_refuses()
    words = ("everything kept", "blocks in Remat", "blocks in torch.utils.checkpoint")
    assert done.stderr.splitlines() == [f"per-sample gradients, {w} ..." for w in words]


def test_table_of_a_file(tmp_path, capsys):
    file = tmp_path / "text"
    file.write_bytes(b"x" * 25)
    main([str(file), *OPTIONS])
    table = capsys.readouterr().out
    assert "6 layers of width 16, 3 sequences of 24 bytes" in table and torch_refuses() in table
    ratios = {line[:16].strip(): float(line.split()[-1]) for line in table.splitlines()[4:8]}
    assert [*ratios] == ["peak live bytes", "saved bytes", "FLOPs", "time"]
    assert ratios["saved bytes"] < 0.25 and 1 < ratios["FLOPs"] < 1.5
    assert len(own_sources()) > 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30"], "--width 30 is not divisible by --heads 4"),
        (["no/such/file"], "cannot read no/such/file: No such file or directory"),
        (["--context", "10000000"], "the text has"),
        (["--device", "nonsense"], "--device nonsense: "),
        (["--batch", "0"], "argument --batch: 0 is not positive"),
        (["--layers", "many"], "argument --layers: "),
    ],
)
def test_bad_options_are_told_in_the_last_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m funcckpt: error: {message}")
