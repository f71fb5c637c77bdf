"""A checkpointed function behaves like the function: what it does to its surroundings, and what they do to
it, is what it would be without remat, or an error. Each program was once wrong without an error.
"""

import copy
import importlib
import pickle
import random
import sys
import types
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from oracles import F64, assert_same, compare, observe, tensor
from support import WRAPS, registered
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils._pytree import tree_leaves

from funcckpt import InputError, MutationError, policies, remat
from funcckpt.nn import Remat

PROGRAMS = {}
program = registered(PROGRAMS)
leaf = lambda *shape, seed=0: tensor(*shape, seed=seed, requires_grad=True)


@program
def tangents_that_are_zero_below_a_double_backward(wrap):
    """torch makes zeros without memory for them."""
    w, x = leaf(2, 3, 3), leaf(3, seed=1)
    f = vmap(wrap(lambda p, x: ((h := torch.sigmoid(p["w"] @ x * 0.5)), 2 * h)), (0, None))
    once = lambda p, g: jvp(g, (p,), ({"w": torch.cos(p["w"])},))[1]
    twice = once({"w": w}, lambda p: once(p, lambda p: f(p, x)))
    out = sum(y.tanh().sum() for y in tree_leaves(twice))
    first = torch.autograd.grad(out, (w, x), create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), (w, x))


@program
def what_a_transform_inside_stores(wrap):
    """It belongs to a level that is over after the first run."""
    seen = types.SimpleNamespace()

    def inner(y):
        seen.last = y
        return y.sin()

    f = wrap(lambda x: x.sum() + vmap(inner)(x).sum())
    return grad(f)(tensor(3)), vmap(grad(f))(tensor(2, 3)), torch.is_tensor(seen.last)


@program
def what_a_transform_leaves_of_a_dual_tensor(wrap):
    """Operators see what is inside of the level that is over: f uses a dual tensor."""
    with forward_ad.dual_level():
        dual, left, z = forward_ad.make_dual(tensor(3), tensor(3, seed=1)), [], leaf(3, seed=2)
        grad(lambda y: (left.append(dual + 0 * y), y.sum())[1])(tensor(3))
        y = wrap(lambda z: (z * left[0]).sin())(z)
        return [forward_ad.unpack_dual(x).tangent for x in (y, *torch.autograd.grad(y.sum(), z))]


@program
def leaf_hooks_run_once_per_backward(wrap):
    calls, w = [], leaf(3)
    w.register_hook(lambda g: calls.append(g.clone()))
    wrap(lambda x: torch.tanh(w * x) * w.sin())(tensor(3, seed=1)).sum().backward()
    return calls


class Scaled(nn.Parameter):
    scale = 3.0

    def scaled(self):
        return self * self.scale


@program
def parameters_whose_class_f_asks_for(wrap):
    """As an argument; captured, with a hook; and in second derivatives."""
    p, q = Scaled(tensor(3)), Scaled(tensor(3, seed=1))
    q.register_hook(lambda g: g * 2)
    f = wrap(lambda p, x: (x * p.scaled()).sin() * (3 if isinstance(q, Scaled) else 1) * q)
    first = torch.autograd.grad(f(p, tensor(3, seed=2)).sum(), [p, q], create_graph=True)
    return *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), [p, q])


@program
def parameters_whose_class_f_asks_for_under_a_transform(wrap):
    p = Scaled(tensor(3))
    return grad(lambda x: wrap(lambda x: (x * p.scaled()).sin())(x).sum())(tensor(3, seed=1))


@program
def a_dict_keyed_by_tensors(wrap):
    p, q = leaf(3), leaf(3, seed=1)
    factors, names = {p: 3.0}, {p: "p", q: "q"}
    q.register_hook(lambda g: g * 2)
    f = lambda x: sum((x * t).sin() * factors.get(t, 1.0) * len(names[t]) for t in (p, q)).sum()
    first = torch.autograd.grad(wrap(f)(tensor(3, seed=2)), [p, q], create_graph=True)
    under = grad(lambda w: wrap(lambda x: (x * w).sin() * {w: 2.0}[w])(tensor(3)).sum())(tensor(3, seed=1))
    return *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), [p, q]), under


class Meta(type):
    factor = property(lambda cls: cls._factor)

    def __instancecheck__(cls, x):
        return cls._factor > 1


@program
def a_property_of_a_metaclass(wrap):
    class Configured(metaclass=Meta):
        _factor = 2.0

    x = leaf(3)
    y = wrap(lambda x: (x * Configured.factor * (3 if isinstance(x, Configured) else 1)).sin())(x)
    Configured._factor = 0.5
    return torch.autograd.grad(y.sum(), x)


@program
def what_text_is_made_of(wrap):
    class Number:
        def __init__(self, value):
            self.value = value

        def __str__(self):
            return str(self.value)

    number, x = Number(2.0), leaf(3)
    y = wrap(lambda x: (x * float(f"{number}")).sin())(x)
    number.value = 5.0
    return torch.autograd.grad(y.sum(), x)


@program
def a_hook_that_refers_to_its_tensor(wrap):
    def f(x):
        h = x.sin()
        h.register_hook(lambda g: g * h.detach())
        return h.cos()

    x = leaf(3)
    return torch.autograd.grad(wrap(f)(x).sum(), x)


@program
def a_hook_on_an_argument(wrap):
    """As MuZero scales the gradient that enters each step of its model."""
    w, x = leaf(3, 3, seed=1), leaf(3)

    def f(h):
        h.register_hook(lambda g: g * 0.5)
        return (h @ w).tanh()

    h = x.sin()
    for _ in range(3):
        h = wrap(f)(h)
    return torch.autograd.grad(h.sum(), (w, x))


@program
def a_hook_and_an_argument_without_views(wrap):
    w = leaf(3, 3, seed=1)

    def f(x, w):
        h = w * w
        h.register_hook(lambda g: 2 * g)
        return torch.sparse.mm(x, h).sin()

    x = torch.eye(3, dtype=F64).to_sparse()
    return torch.autograd.grad(wrap(f)(x.requires_grad_(), w).sum(), w)


@program
def a_hook_in_a_batched_backward(wrap):
    def f(x):
        x.register_hook(lambda g: 2 * g)
        return x.sin().exp() * x

    x = leaf(3)
    y = wrap(f)(x * 1)
    return vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(3, dtype=F64))


@program
def a_pullback_that_f_makes_and_stores(wrap):
    stored, w = [], leaf(3, seed=1).detach()

    def f(x):
        y, pull = torch.func.vjp(torch.sin, w)
        stored.append(pull)
        return (x * y).sum()

    x = leaf(3)
    return torch.autograd.grad(wrap(f)(x), x), stored[0](torch.ones_like(w))


@program
def forces_with_respect_to_an_argument(wrap):
    """Another argument was computed from it outside. (`remat` cannot know that: see the contract.)"""
    w, position = leaf(3, seed=1), leaf(4, 3)
    edges = position[1:] - position[:-1]

    def f(position, edges):
        energy = ((edges * w).square().sum() + (position * w).sum()).tanh()
        return energy, torch.autograd.grad(energy, position, create_graph=True)[0]

    energy, forces = (f if wrap is remat else wrap(f))(position, edges)
    return torch.autograd.grad(energy + forces.pow(2).sum(), w)


@program
def an_argument_made_to_require_grad(wrap):
    """Forces, as machine-learned potentials compute them."""
    w, position = leaf(3, 4, seed=1), tensor(5, 3)

    def f(position):
        position.requires_grad_(True)
        energy = (position @ w).tanh().sum()
        return energy, torch.autograd.grad(energy, position, create_graph=True)[0]

    energy, forces = wrap(f)(position)
    (energy + forces.pow(2).sum()).backward()
    return w.grad, position.grad


@program
def an_optimizer_in_the_backward(wrap):
    """It changes parameters that later recomputations can reach, and do not use."""
    torch.manual_seed(0)
    blocks, x = nn.ModuleList([nn.Linear(3, 3, dtype=F64) for _ in range(3)]), leaf(3)
    for p in blocks.parameters():
        optimizer = torch.optim.SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    y = x
    for i in range(3):
        y = wrap(lambda x, i: blocks[i](x).tanh())(y, i)
    y.sum().backward()
    return x.grad, list(blocks.parameters())


@program
def backward_hooks_that_log(wrap):
    """Of modules inside of f: into one dict, and into an object, for all calls."""
    torch.manual_seed(0)
    blocks, x = [nn.Sequential(nn.Linear(3, 3, dtype=F64), nn.Tanh()) for _ in range(3)], leaf(3)
    norms, seen = {}, types.SimpleNamespace(count=0, scale=1.0)

    def log(module, grads, outs, name):
        norms[name] = outs[0].norm()
        seen.count += 1
        return (grads[0] * seen.scale,)

    y = x
    for i, block in enumerate(blocks):
        block[0].register_full_backward_hook(partial(log, name=i))
        y = wrap(block)(y)
    seen.scale = 0.5
    y.sum().backward()
    return x.grad, norms, vars(seen)


@program
def backward_hooks_are_those_of_the_call(wrap):
    """One is removed before the backward, one comes later, and f registers one in each call."""
    torch.manual_seed(0)
    block, x = nn.Linear(3, 3, dtype=F64), leaf(3)
    times = lambda factor: lambda module, grads, outs: (grads[0] * factor,)
    gone = block.register_full_backward_hook(times(2))

    def f(x):
        block.register_full_backward_hook(times(0.5))
        return block(x).sin()

    y = wrap(f)(wrap(f)(x.exp())).sum()
    gone.remove()
    block.register_full_backward_hook(times(3))
    y.backward()
    return x.grad, len(block._backward_hooks)


@program
def what_a_class_gains_is_no_change(wrap):
    """A cache that grows, as those of rotary embeddings do, and an attribute that nobody read."""

    class Tables:
        made: ClassVar[dict] = {}

        def __call__(self, x):
            if len(x) not in self.made:
                self.made[len(x)] = torch.arange(len(x), dtype=F64)
            return (x * self.made[len(x)]).sin()

    leaves = [leaf(3), leaf(3, seed=1), leaf(4, seed=2)]
    out = sum(wrap(Tables())(x).sum() for x in leaves)
    Tables.other = out.detach()
    out.backward()
    return [x.grad for x in leaves]


@program
def hook_on_a_copy(wrap):
    """Containers without content are shared by shallow copies, captured by themselves, and filled later."""
    torch.manual_seed(0)
    a, x = nn.Linear(3, 3, dtype=F64), leaf(3)
    b, hooks = copy.copy(a), a._forward_hooks
    y = wrap(lambda x: b(a(x)) * (1 + len(hooks)))(x)
    a.register_forward_hook(lambda module, args, out: 2 * out)
    return torch.autograd.grad(y.sum(), x)


@program
def a_buffer_that_f_registers(wrap):
    module, x = nn.Tanh(), leaf(3)

    def f(x):
        if not module._buffers:
            module.register_buffer("cache", torch.ones(3, dtype=F64), persistent=False)
        return module(x) * module.cache

    return torch.autograd.grad(wrap(f)(x).sum(), x)


@program
def a_leaf_of_its_own_trained_by_backward(wrap):
    def f(x):
        w = torch.ones(3, dtype=F64, requires_grad=True)
        (w * x.detach().sin()).square().sum().backward()
        return x.exp() * w.grad

    x = leaf(3)
    return torch.autograd.grad(wrap(f)(x * 2).sum(), x)


@program
def compiled_modules_are_recomputed_as_they_were_written(wrap):
    module, x = nn.Linear(3, 3, dtype=F64), leaf(3)
    nn.init.eye_(module.weight), nn.init.ones_(module.bias)
    compiled = torch.compile(module, backend="eager")
    (wrap(compiled)(x).sin() + wrap(lambda x: compiled(x).cos())(x)).sum().backward()
    return x.grad, module.weight.grad


class Halved(torch.Tensor):
    """Says what operators do; in its own backward, it has no say any more."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            args = args[0], args[1] * 0.5
        return super().__torch_function__(func, types, args, kwargs or {})


@program
def parameters_of_a_class_of_their_own(wrap):
    module, x = nn.Linear(3, 3, bias=False, dtype=F64), leaf(3)
    module.weight = nn.Parameter(tensor(3, 3, seed=1).as_subclass(Halved))
    wrap(lambda x: module(x).sin() * (2 if isinstance(module.weight, Halved) else 3))(x).sum().backward()
    gradient = grad(lambda x: wrap(module)(x).as_subclass(torch.Tensor).sum())(tensor(3))
    return x.grad, module.weight.grad.as_subclass(torch.Tensor), gradient


class Labelled(torch.Tensor):
    """An override that reads what a detached tensor does not have, as LabelTensor of pina."""

    def requires_grad_(self, requires_grad=True):
        assert self.labels
        return super().requires_grad_(requires_grad)


@program
def tensors_that_override_methods(wrap):
    x = tensor(3).as_subclass(Labelled)
    x.labels = ["a", "b", "c"]
    x.requires_grad_()
    y = x * 1
    y.labels = x.labels
    f = lambda z: (z * len(z.labels)).sin().sum()
    unused = lambda a: (f(y), a.cos())[1]
    out = (
        wrap(f)(x) * wrap(lambda a: f(y) * a)(tensor()) * wrap(unused)(y * 1).as_subclass(torch.Tensor).sum()
    )
    first = torch.autograd.grad(out, x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x)[0]
    return first.as_subclass(torch.Tensor), second.as_subclass(torch.Tensor)


class Exp(torch.autograd.Function):
    """In the old style, which torch.func refuses."""

    forward = staticmethod(lambda ctx, x: (ctx.save_for_backward(x), x.exp())[1])
    backward = staticmethod(lambda ctx, ct: ct * ctx.saved_tensors[0].exp())


@program
def second_derivatives_of_an_old_autograd_function(wrap):
    x, w = leaf(3), leaf(3, seed=1)
    out = wrap(lambda x: Exp.apply(x.sin() * w) * x)(x)
    first = torch.autograd.grad(out.sum(), (x, w), create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), (x, w))


class File:
    closed = 0

    def __init__(self, content):
        self.content = content

    def __del__(self):
        File.closed += 1


@program
def an_object_is_not_closed_by_a_run(wrap):
    before, files = File.closed, []
    f = lambda x: files.append(File(x.sin())) or wrap(lambda x, file=files[-1]: x * file.content)(x).sum()
    return grad(f)(tensor(3)), File.closed - before


class Once(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.exp())
    backward = staticmethod(torch.autograd.function.once_differentiable(lambda ctx, ct: ct * 2))


@program
def a_second_derivative_that_is_refused(wrap):
    x = leaf(3)
    first = torch.autograd.grad(wrap(lambda x: Once.apply(x * x))(x).square().sum(), x, create_graph=True)
    first[0].sum().backward()


@program
def what_was_assigned_before_it_failed(wrap):
    box = types.SimpleNamespace(w=leaf(3), failed=False)

    def f(x):
        box.failed = True
        raise ValueError(box.w * x)

    with pytest.raises(ValueError):
        wrap(f)(leaf(3))
    return box.failed


@program
def an_output_that_is_an_input(wrap):
    x, v, w = leaf(3), leaf(3), tensor(3)
    y, *same, twice = wrap(lambda x: ((y := x * v * w), x, v, w, y))(x)
    return [a is b for a, b in zip(same, (x, v, w))], twice is y


@program
def frozen_for_the_forward_or_the_backward(wrap):
    x, w, b = leaf(3, 3), leaf(3, 3, seed=1).requires_grad_(False), leaf(3)
    y = wrap(lambda x, b: torch.tanh(x @ w.T) * (b * 1))(x, b)  # torch asks a saved leaf only in the backward
    w.requires_grad_()
    b.requires_grad_(False)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    b.requires_grad_()
    (first.square() + y).sum().backward()
    return x.grad, w.grad, b.grad


@program
def a_batched_backward_of_what_calls_a_transform(wrap):
    inner = lambda x: wrap(lambda x: wrap(torch.sin)(x).exp() * x)(x) * grad(lambda x: x.sin().sum())(x)
    return torch.autograd.functional.jacobian(wrap(inner), leaf(3), vectorize=True)


@program
def views_of_inputs_that_no_graph_knows(wrap):
    w, x = tensor(3), tensor(3, seed=1)
    view = lambda x, w: (x * 2, torch.no_grad()(w.view)(-1))
    f = lambda w, x: sum(a * b for a, b in (wrap(view)(x, w), wrap(lambda x: view(x, w))(x))).sum()
    return grad(f, (0, 1))(w, x), torch.autograd.grad(f(w.requires_grad_(), x.requires_grad_()), x)


@program
def an_attribute_in_place_of_another(wrap):
    def f(x, there):
        del there.old
        there.new = None
        return x * there.w

    def loss(w):
        there.append(types.SimpleNamespace(w=w, old=None))
        return wrap(lambda x, there=there[-1]: f(x, there))(w).sum()

    there = []
    return grad(loss)(tensor(3)), [*vars(there[0])]


@program
def code_that_catches_everything(wrap):
    def f(x):
        h = x.sin()
        try:
            return h.cos() * 2
        except BaseException:  # the end of a recomputation
            return h.cos().exp().sin()

    return torch.autograd.grad(wrap(f)(x := leaf(3)).sum(), x)


@program
def detached_values_of_an_earlier_vmap(wrap):
    class Block(nn.Module):
        def forward(self, x):
            self.last = x.detach()
            return (x + self.shift).sin().sum()

    (block := Block()).register_buffer("shift", torch.zeros(3, dtype=F64))
    f, x = wrap(block), leaf(3)
    vmap(grad(f))(tensor(2, 3)), grad(lambda x: grad(f)(x).sum())(x)
    return jvp(grad(f), (tensor(3),), (tensor(3),)), grad(f)(tensor(3)), torch.autograd.grad(f(x), x)


@program
def a_counter_that_is_assigned_at_levels(wrap):
    """Torch takes away only one level that is over: what is stored must not collect them."""

    class Counted(nn.Module):
        def forward(self, x):
            self.count = self.count + 1
            return x.sin() * self.count

    (block := Counted()).register_buffer("count", torch.tensor(0))
    f = wrap(block)
    return [vmap(grad(lambda x: f(f(x)).sum()))(tensor(2, 3)) for _ in range(3)], block.count + 0


@program
def tensors_moved_by_hooks_in_forward_mode(wrap):
    with torch.autograd.graph.save_on_cpu(), forward_ad.dual_level():
        x = forward_ad.make_dual(leaf(3), tensor(3, seed=1))
        return forward_ad.unpack_dual(torch.autograd.grad(wrap(torch.sin)(x).sum(), x)[0]).tangent


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_without_a_checkpoint(name, wrap):
    compare(PROGRAMS[name], WRAPS[wrap])


def test_hooks_get_what_is_kept_alone():
    packed = []
    pack = lambda x: packed.append(x.shape) or x
    f = lambda x: x.sin().exp() * grad(lambda z: z.cos().sum())(x)

    def run(f):
        x = tensor(3).requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = run(remat(f))
    assert packed == [(3,)]
    torch.testing.assert_close(found, run(f))


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
def test_an_argument_that_f_changes(transform):
    pops = lambda x, skips: x * skips.pop()
    writes = lambda x, aux: (aux.update(n=1), x.sin())[1]
    for f, make in ((pops, lambda x: [x.sin(), x.cos()]), (writes, lambda x: {"x": x})):
        with pytest.raises(MutationError, match="list or dict"):
            observe(transform, lambda x, f=f, make=make: remat(f)(x, make(x)), (tensor(3),))


@pytest.mark.parametrize("transform", ["backward", "grad", "vmap_grad"])
@pytest.mark.parametrize("alias", [lambda y: (y, y[:2]), lambda y: (y, y.detach())], ids=["view", "detached"])
def test_writing_to_outputs_that_share_memory(alias, transform):
    def f(x):
        a, b = remat(lambda x: alias(x.sin()))(x)
        a.mul_(3)
        return a.square().sum() + b.square().sum()

    with pytest.raises(RuntimeError, match=r"modified (by an )?in-?place"):
        observe(transform, f, (tensor(3),))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("what", ["parameter", "variable", "computed variable", "argument"])
def test_backward_inside(what, wrap):
    module, w = nn.Linear(3, 3, dtype=F64), leaf(3)
    parts = {"parameter": lambda x: module(x.detach()), "variable": lambda x: w.exp(), "argument": torch.exp}
    parts["computed variable"] = lambda x: v.exp()

    def f(x):
        parts[what](x).sin().sum().backward()
        return x.sin()

    for x in (leaf(2, 3), leaf(2, 3) * 2):
        v = w * 2
        with pytest.raises(MutationError, match=r"calls backward.*torch\.autograd\.grad"):
            WRAPS[wrap](f)(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=F64)
        self.block = remat(self.sine)

    def sine(self, x):
        return self.linear(x).sin()


@remat
def decorated(x):
    return x.sin()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied):
    """A copy of a model has its own parameters."""
    assert copied(decorated) is decorated
    model = Model()
    other = copied(model)
    with torch.no_grad():
        other.linear.weight.zero_()
    y = other.block(tensor(3))
    assert_same(y, other.linear.bias.sin())
    y.sum().backward()
    assert model.linear.weight.grad is None and other.linear.weight.grad is not None


@pytest.mark.parametrize("wrap", [*WRAPS.values(), Remat])
def test_expanded_weights(wrap):
    """Torch's own gradients for each sample: its parameters answer no question."""

    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3, dtype=F64), nn.Tanh(), nn.Linear(3, 2, dtype=F64))
        layers, y = [wrap(layer) for layer in model], leaf(2).exp()
        last = (WRAPS["checkpoint"] if wrap is Remat else wrap)(lambda x: layers[2](x) * y)
        model.forward = lambda x: last(layers[1](layers[0](x)))
        call_for_per_sample_grads(model, loss_reduction="sum")(tensor(5, 3)).square().sum().backward()
        return [p.grad_sample for p in model.parameters()]

    if wrap is remat:
        for policy in (None, policies.dots_saveable):
            with pytest.raises(InputError, match=r"uses an ExpandedWeight.* Use checkpoint"):
                run(partial(remat, policy=policy))
    else:
        compare(lambda each: run(wrap if each is remat else each), remat)


PACKAGE = """
import random
import numpy as np
from torch import nn

def draw():
    return random.gauss(0, 1) + np.random.randn()

class Noisy(nn.LayerNorm):
    k = 2.0
    def forward(self, x):
        return self.scaled(super().forward(x)) + x * random.random() + x * np.random.standard_normal()
    def scaled(self, x):
        return x * self.k
    def moved(self, x):
        return x + self.shift
"""


def imports(x):
    import noisy_package

    return x * noisy_package.draw()


@pytest.mark.parametrize("transform", ["backward", "vmap_grad"])
@pytest.mark.parametrize("by", ["function", "own_module", "import", "eps", "k", "shift"])
def test_an_installed_package(by, transform, tmp_path, monkeypatch):
    """It draws random numbers that are not torch's, and it reads attributes of a module of one's own."""
    path = tmp_path / "site-packages"
    path.mkdir()
    (path / "noisy_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(path)
    package = importlib.import_module("noisy_package")
    monkeypatch.setitem(sys.modules, "noisy_package", package)
    own = {"forward": lambda self, x: self.moved(x).sin(), "shift": 1.0} if by == "shift" else {}
    strict = type("Strict", (dict,), {"__getattr__": dict.__getitem__})()  # knows no other attribute
    Own = type("Own", (package.Noisy,), {"__module__": __name__, "options": strict, **own})

    def run(wrap):
        random.seed(0)
        np.random.seed(0)
        np.random.randn()  # half of a pair: the next number moves no counter
        if by == "import":
            sys.modules.pop("noisy_package")
        module = Own(3, dtype=F64)
        module.k = 2.0
        f = wrap({"function": lambda x: x * package.draw(), "import": imports}.get(by, lambda x: module(x)))

        def twice(x):
            y = f(f(x - x.detach()))  # the outputs, all zero, would not tell
            if by in ("eps", "k", "shift"):
                setattr(module, by, 3.0)
            return y + x.sin()

        return observe(transform, twice, (tensor(3),)), random.random(), np.random.rand()

    compare(run, remat)
