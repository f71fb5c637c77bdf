"""What f finds elsewhere than among its arguments: in the recomputation as in the forward, or an error.

Torch's checkpoint gives other gradients in these cases, without a word, where not said otherwise.
"""

import contextlib
import functools
import io
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import assert_same
from torch import nn
from torch.nn.utils import parametrize

from funcckpt import checkpoint, checkpoint_scope, remat, world
from funcckpt.errors import MutationError

from .implementations import D, leaf


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=D)
        self.position = nn.Parameter(torch.zeros(2, 3, dtype=D))
        self.frozen = nn.Parameter(torch.zeros(2, 3, dtype=D), requires_grad=False)
        self.register_buffer("large", torch.zeros(2, 3, dtype=D).repeat(1, 2**15)[:, :70_000])

    def forward(self, x, what):
        return (x + getattr(self, what)[:, :3]).tanh().exp()


BIAS = nn.Parameter(torch.zeros(3, dtype=D))


def ways(model, what):
    there, x = types.SimpleNamespace(), leaf(2, 3)
    there.parts = {"m": [model]}
    return {
        "module": (model, (x, what)),
        "lambda": (lambda x: model(x, what), (x,)),
        "list": (lambda x, ms=[model]: ms[0](x, what), (x,)),
        "object": (lambda x: there.parts["m"][0](x, what), (x,)),
        "argument": (lambda m, x: m(x, what), (model, x)),
        "global": (lambda x: (x + BIAS).tanh().exp(), (x,)),
    }


@pytest.mark.parametrize("what", ["position", "frozen", "large"])
@pytest.mark.parametrize("way", ways(Model(), "position"))
def test_what_autograd_does_not_save_is_looked_after(way, what):
    model = Model()
    f, args = ways(model, what)[way]
    changed = BIAS if way == "global" else getattr(model, what)
    unchecked = checkpoint(f, *args, determinism_check="none")
    y = checkpoint(f, *args)
    with torch.no_grad():
        changed.add_(1)
    named = "'BIAS'" if way == "global" else f"'{what}'"
    with pytest.raises(
        MutationError, match=rf"{named}.*float64\{list(changed.shape)}.*changed in place since the forward"
    ):
        y.sum().backward()
    changed.requires_grad_(not changed.requires_grad)
    unchecked.sum().backward()
    changed.requires_grad_(not changed.requires_grad)
    checkpoint(f, *args).sum().backward()


def test_what_f_itself_has_changed_is_said_so():
    model = Model()
    y = checkpoint(lambda x: x.exp() * model.frozen.add_(1), leaf(2, 3))
    with pytest.raises(
        MutationError, match=r"parameter 'frozen' of closure variable 'model' \(.* at most 262144"
    ):
        y.sum().backward()


def test_what_a_hook_has_changed_is_said_so():
    model, total = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.zeros(3, 2)
    model[0].register_forward_pre_hook(lambda module, args: total.add_(args[0].detach()))
    y = checkpoint(model, torch.ones(3, 2))
    says = r"'total' of item .* A hook inside .* wrap single layers\.$"
    with pytest.raises(MutationError, match=says):
        y.sum().backward()
    with pytest.raises(MutationError, match=says):
        remat(model)(torch.ones(3, 2))


class Plus(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, w):
        return w + self.delta


def test_a_parametrization_that_f_itself_registers():
    """As peft does for LoRA on parameters. To remove it writes to the weight, but not another value."""
    model, delta, x = Model().requires_grad_(False), leaf(3, 3), leaf(2, 3)

    def f(x):
        parametrize.register_parametrization(model.linear, "weight", Plus(delta * delta))
        try:
            return model.linear(x).tanh()
        finally:
            parametrize.remove_parametrizations(model.linear, "weight", leave_parametrized=False)

    with pytest.raises(MutationError, match=r"'weight'.*determinism_check=\"none\" turns this check off"):
        checkpoint(f, x).sum().backward()
    expected = torch.autograd.grad(f(x).sum(), [x, delta])
    y = checkpoint(f, x, determinism_check="none")
    assert_same(torch.autograd.grad(y.sum(), [x, delta]), expected)


def test_changed_and_not_needed_is_no_error():
    w, b, x = leaf(3, 3), leaf(3), leaf(2, 3)
    y = checkpoint(lambda x: (x @ w).tanh() @ w + b + b.numel(), x)
    expected = torch.autograd.grad(((x @ w).tanh() @ w).sum(), [x, w])
    with torch.no_grad():
        b.add_(1)
    assert_same(torch.autograd.grad(y.sum(), [x, w]), expected)


def test_a_result_that_was_replaced():
    """What is not part of the graph of f is kept without its own graph."""
    x, owned = leaf(3), nn.Module()  # by the node of the result
    state = {"h": x.sin()}
    node, state["h"].grad_fn.metadata["owned"] = weakref.ref(owned), owned
    del owned
    y = checkpoint(lambda x: (x * state["h"].detach()).exp(), x)
    state["h"] = x.cos()
    assert node() is None
    assert_same(torch.autograd.grad(y.sum(), x)[0], (y * x.sin()).detach())


def test_a_region_that_draws_nothing_leaves_the_streams_alone(monkeypatch):
    touched = []
    set_streams = world.set_streams
    monkeypatch.setattr(world, "set_streams", lambda states: (touched.extend(states), set_streams(states)))
    x = leaf(3)
    checkpoint(lambda x: x.sin().exp(), x).sum().backward()
    assert not touched
    checkpoint(lambda x: F.dropout(x).exp(), x).sum().backward()
    assert len(touched) == 2


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_what_f_sees_of_an_argument_beside_its_value(hooks):
    """Hooks give back another tensor."""
    seen = lambda p: p * getattr(p, "scale", 1.0) * (2 if isinstance(p, nn.Parameter) else 1)
    f = lambda p, q: (seen(p) * seen(q)).sin().exp()

    def run(*around):
        p, q = nn.Parameter(torch.tensor([0.3], dtype=D)), torch.tensor([0.2], dtype=D, requires_grad=True)
        p.scale, q.scale = 2.0, 3.0
        with hooks():
            y = functools.reduce(lambda f, wrap: functools.partial(wrap, f), around, f)(p, q)
        return torch.autograd.grad(y.sum(), (p, q))

    for around in ((checkpoint,), (checkpoint, checkpoint)):
        assert_same(run(*around), run())


def test_an_input_of_a_checkpoint_inside_of_another_was_changed():
    """The outer recomputation stops before it reads that input."""
    w, x = leaf(3, 3).detach(), leaf(3)
    y = checkpoint(lambda x: checkpoint(lambda x, w: (x @ w).tanh(), x, w), x)
    w.add_(1)
    with pytest.raises(MutationError, match="closure variable 'w'"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("wrap", [remat, lambda f: functools.partial(checkpoint, f)])
def test_parameters_of_torchscript(wrap, is_loaded):
    """No mode sees what it reads. Python holds no parameter of a module that was loaded."""
    net = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double())
    if is_loaded:
        file = io.BytesIO()
        torch.jit.save(net, file)
        file.seek(0)
        net = torch.jit.load(file)
    x, f = leaf(3), lambda x: net(x).sin()

    def gradients(f):
        f(x).sum().backward()
        found = [y.grad.clone() for y in (x, *net.parameters())]
        for y in (x, *net.parameters()):
            y.grad = None
        return found

    for _ in range(3):  # In its first runs TorchScript compiles it, which no checkpoint may stop.
        expected = gradients(f)
    assert_same(gradients(wrap(f)), expected)
    y = wrap(f)(x)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    del p
    with pytest.raises(MutationError):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrap", [remat, lambda f: functools.partial(checkpoint, f)])
def test_changed_torchscript_that_f_only_holds(wrap):
    parts = [torch.jit.script(nn.Linear(3, 3).double()) for _ in range(2)]
    x, f = leaf(3), lambda x: parts[0](x).sin()
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    y = wrap(f)(x)
    with torch.no_grad():
        parts[1].weight.mul_(2)
    assert_same(torch.autograd.grad(y.sum(), x)[0], expected)


def test_a_statistic_that_an_evaluation_in_inference_mode_has_left():
    """A scope keeps what its parts read, also what autograd would not save."""
    model = types.SimpleNamespace(statistic=torch.zeros((), dtype=D))

    def f(x):
        y = torch.tanh(x)
        model.statistic = model.statistic * 0.9 + y.detach().mean()
        return y * x

    def scoped(x):
        with checkpoint_scope():
            return f(x)

    def gradient(f):
        model.statistic = torch.zeros((), dtype=D)
        with torch.inference_mode():
            f(x)
        return torch.autograd.grad(f(x).sum(), x)[0], model.statistic

    x = leaf(3)
    assert_same(gradient(functools.partial(checkpoint, scoped)), gradient(f))


@pytest.mark.parametrize("inner", [remat, lambda f: lambda x: checkpoint(f, x)])
def test_an_argument_that_is_also_captured_is_one_object(inner):
    """To a checkpoint inside of f, which else would save another number of tensors."""

    def gradients(wrap):
        x, w = [v.clone().requires_grad_() for v in values]
        h = x.sin()

        def f(a, q):
            unused = inner(lambda a: a * h * q)(a.detach())
            return inner(lambda a: a * w.sin() * h)(a) + a.sin() * unused.detach().numel()

        return torch.autograd.grad(wrap(f)(h.cos(), h).sum(), [x, w])

    def frozen(wrap):
        x, w = [v.clone().requires_grad_() for v in values]
        y = wrap(lambda x, q: inner(lambda a: a * w.sin() * q)(x) + x.sin() * x.cos())(x, w)
        w.requires_grad_(False)
        return torch.autograd.grad(y.sum(), x)

    values, by_hooks = torch.rand(2, 3, dtype=D), lambda f: lambda *args: checkpoint(f, *args)
    for program in (gradients, frozen):
        assert_same(program(by_hooks), program(lambda f: f))


def test_a_statistic_made_in_inference_mode():
    """f is undone, since it calls a transform: nobody has updated such a tensor."""
    norm, x = nn.BatchNorm1d(3, dtype=D), leaf(4, 3)
    with torch.inference_mode():
        table = torch.ones(3, dtype=D)
    f = lambda x: norm(x) * torch.func.grad(lambda r: r.sin().sum())(x) + table
    assert_same(checkpoint(f, x).detach(), f(x).detach())


def inside_of_a_scope(x, w, q):
    """A remat that makes a leaf, in a checkpoint, in a scope."""
    f = lambda a: remat(lambda b: b.detach().requires_grad_() * b)(a).exp()
    h = x * 2
    with checkpoint_scope():
        return checkpoint(f, h)


def scope_in_a_gradient(x, w, q):
    h, wr = x.sin(), w.exp()

    def f(a, q):
        def g(a):
            with checkpoint_scope():
                k = h * q
                return a * k

        t = wr * 1.0
        return torch.autograd.grad((checkpoint(g, t) * wr).sum(), t, create_graph=True)[0]

    return remat(f, policy=[torch.ops.aten.mul.Tensor])(h, q)


def derivative_of_a_captured_tensor(x, w, q):
    h = x.sin()
    return remat(lambda a: a * torch.autograd.grad((h * h.exp()).sum(), h)[0])(w) * q


@pytest.mark.parametrize("program", [inside_of_a_scope, scope_in_a_gradient, derivative_of_a_captured_tensor])
def test_scopes_and_gradients_inside(program, monkeypatch):
    values = torch.rand(3, 3, dtype=D)

    def gradients():
        leaves = [v.clone().requires_grad_() for v in values]
        y = program(*leaves)
        return torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True, materialize_grads=True)

    got = gradients()
    monkeypatch.setitem(globals(), "checkpoint", lambda f, *args: f(*args))
    monkeypatch.setitem(globals(), "remat", lambda f, policy=None: f)
    monkeypatch.setitem(globals(), "checkpoint_scope", contextlib.nullcontext)
    assert_same(got, gradients())


@pytest.mark.parametrize("inner", [remat, lambda f: functools.partial(checkpoint, f)])
def test_a_module_that_f_makes(inner):
    """Nobody else holds its parameters: a region that held them would be another run than its recomputation."""

    def both(f):
        return functools.partial(checkpoint, remat(f))

    def program(outer, inner):
        torch.manual_seed(0)
        start = leaf(3)
        x = start * 1.5

        def f(a):
            x.sum()  # captured, computed, and of no use
            module = nn.Linear(3, 3, dtype=D)
            y = inner(lambda a: module(a) * a)(a)
            return y * y

        a = torch.ones(3, dtype=D)
        loss = (outer(f)(a) + outer(f)(a)).sum() * x.sum()
        loss.backward()
        return loss, start.grad

    assert_same(program(lambda f: both(both(f)), inner), program(lambda f: f, lambda f: f))
