"""The pictures show what was measured."""

import importlib
from functools import partial

import pytest
import torch
from torch.func import grad, vmap

from funcckpt import InputError, OptionError, checkpoint, explain, policies, remat
from funcckpt.inspect.plot import plot_memory, plot_tradeoff
from funcckpt.meter import measure

PS = [torch.randn(16, 16) for _ in range(4)]
X = torch.randn(64, 16)
MM = [torch.ops.aten.mm.default]
layer = lambda p, x: torch.tanh(torch.tanh(x @ p))


def deep(wrap):
    def loss(ps, x):
        for p in ps:
            x = wrap(layer)(p, x)
        return x.sum()

    return loss


def hooked(ps, x):
    for p in ps:
        x = checkpoint(layer, p, x)
    return x.sum()


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")


def lines(ax):
    """The long lines of a plot, by label, in MiB or KiB as drawn."""
    return {
        line.get_label().split(":")[0]: line.get_ydata() for line in ax.lines if len(line.get_ydata()) > 1
    }


def test_memory(pyplot):
    variants = {"plain": grad(deep(lambda f: f)), "remat": grad(deep(remat))}
    ax = plot_memory(variants, PS, X)
    drawn = lines(ax)
    assert ax.get_ylabel() == "live KiB"
    for name, f in variants.items():
        m = measure(f, PS, X)
        assert max(drawn[name]) * 2**10 == m.peak_bytes
        assert len(drawn[name]) == m.ops.total()
    ax.figure.canvas.draw()
    _, ax = pyplot.subplots()
    assert plot_memory(vmap(grad(deep(remat)), (None, 0)), PS, torch.randn(2, 64, 16), ax=ax) is ax
    assert list(lines(ax)) == ["loss, without remat", "loss"]
    assert list(lines(plot_memory(deep(lambda f: f), PS, X))) == ["loss"]


def test_tradeoff(pyplot):
    """No text or axis has a colour of its own, so that a dark style shows them light."""
    with pyplot.style.context("dark_background"):
        ax = plot_tradeoff(hooked, PS, X, policies={"mm": MM})
        found = explain(hooked, PS, X)
        single = [line for line in ax.lines if len(line.get_xdata()) == 1]
        points = {
            text.get_text(): (line.get_xdata()[0], line.get_ydata()[0])
            for text, line in zip(ax.texts, single)
        }
        assert ax.get_xlabel() == "recomputed kFLOPs" and ax.get_ylabel() == "peak live KiB"
        assert points["no remat"] == (0, found.without.peak_bytes / 2**10)
        assert points["no policy"] == (found.recomputed_flops / 1e3, found.cost.peak_bytes / 2**10)
        assert points["mm"][0] == 0
        ax.figure.canvas.draw()
        for drawn in (ax, plot_memory(hooked, PS, X)):
            labels = [drawn.xaxis.label, drawn.yaxis.label]
            texts = [*drawn.texts, *drawn.get_legend().get_texts(), *labels]
            assert {text.get_color() for text in texts} == {"white"}


def test_policies_of_one_name_are_points_of_their_own(pyplot):
    first, second = [lambda ctx, op, *args, **kwargs: False for _ in range(2)]
    ax = plot_tradeoff(hooked, PS, X, policies=[first, second])
    assert [text.get_text() for text in ax.texts] == ["no remat", "no policy", "<lambda> 1", "<lambda> 2"]


def test_errors(pyplot, monkeypatch):
    with pytest.raises(InputError, match="a function and its arguments, not list"):
        plot_memory([torch.sin], X)
    with pytest.raises(InputError, match="runs no operator"):
        plot_memory(lambda: 1.0)
    with pytest.raises(InputError, match="no checkpoint in f"):
        plot_tradeoff(deep(lambda f: f), PS, X, policies=[None])
    with pytest.raises(OptionError, match=r"Pass \[policy\]"):
        plot_tradeoff(deep(remat), PS, X, policies=policies.dots_saveable)
    with pytest.raises(InputError, match="the mapping is empty"):
        plot_memory({}, X)

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    for plot in (plot_memory, partial(plot_tradeoff, policies=[])):
        with pytest.raises(OptionError, match=r"needs matplotlib: pip install matplotlib"):
            plot(torch.sin, X)
