"""Any kind of f: functions, methods, partials, modules, other transforms, and functions that
differentiate inside.
"""

import copy
import functools
from collections import namedtuple

import pytest
import torch
from compositions.functions import Cube
from oracles import F64, OBSERVATIONS, assert_same, compare, observe, plain, tensor, total, weight
from torch import nn
from torch.func import (
    functional_call,
    grad,
    jacfwd,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

from funcckpt import remat

EVERY = list(OBSERVATIONS)


def f(x, y):
    return torch.tanh(x * y) + x.sin()


class Methods:
    def __init__(self, scale=2.0):
        self.scale = scale

    def method(self, x, y):
        return f(x, y) * self.scale

    @classmethod
    def of_class(cls, x, y):
        return f(x, y) * cls.__name__.count("M")

    @staticmethod
    def static(x, y):
        return f(x, y) * 3

    def __call__(self, x, y):
        return f(x, y) * self.scale

    def __matmul__(self, other):
        return self


class Frozen(tuple):
    __slots__ = ()

    def __call__(self, x, y):
        return f(x, y) * self[0]


def decorated(wrap):
    class Decorated:
        scale = 2.0

        @wrap
        def method(self, x, y):
            return f(x, y) * self.scale

        @staticmethod
        @wrap
        def static(x, y):
            return f(x, y)

        @classmethod
        @wrap
        def of_class(cls, x, y):
            return f(x, y) * cls.scale

    return Decorated()


@functools.singledispatch
def dispatched(x, y):
    raise NotImplementedError


@dispatched.register
def _(x: torch.Tensor, y):
    return f(x, y)


CALLABLES = {
    "function": lambda wrap: wrap(f),
    "bound_method": lambda wrap: wrap(Methods().method),
    "class_method": lambda wrap: wrap(Methods.of_class),
    "static_method": lambda wrap: wrap(Methods.static),
    "unbound_method": lambda wrap: functools.partial(wrap(Methods.method), Methods()),
    "callable_object": lambda wrap: wrap(Methods()),
    "callable_tuple": lambda wrap: wrap(Frozen((2.0,))),
    "decorated_method": lambda wrap: decorated(wrap).method,
    "decorated_static_method": lambda wrap: decorated(wrap).static,
    "decorated_class_method": lambda wrap: decorated(wrap).of_class,
    "partial_of_remat": lambda wrap: functools.partial(wrap(lambda n, x, y: f(x, y) ** n), 2),
    "singledispatch": lambda wrap: wrap(dispatched),
    "builtin": lambda wrap: wrap(torch.mul),
    "method_descriptor": lambda wrap: wrap(torch.Tensor.mul),
    "python_functional": lambda wrap: wrap(nn.functional.mse_loss),
    "constructor": lambda wrap: wrap(namedtuple("Pair", "x y")),
    "vmap_out_dims_inside": lambda wrap: wrap(
        vmap(lambda x, y: torch.outer(x.view(1), y.view(1))[0], out_dims=1)
    ),
    "vjp_inside": lambda wrap: wrap(lambda x, y: vjp(f, x, y)[1](x)),
    "jacfwd_inside": lambda wrap: wrap(jacfwd(f, argnums=1)),
}


@pytest.mark.parametrize("transform", EVERY)
@pytest.mark.parametrize("kind", CALLABLES)
def test_same_as_plain(kind, transform):
    args = tensor(3), tensor(3, seed=1)
    make = CALLABLES[kind]
    compare(lambda wrap: observe(transform, make(wrap), args), remat)


# ---------------------------------------------------------------- torch.autograd.grad inside f


def gradient_of_intermediate(x, y):
    z = x * y
    (g,) = torch.autograd.grad((z**3).sum(), z, create_graph=True)
    return g + z


def gradient_norm(x, y):
    (g,) = torch.autograd.grad(total(f(x, y)), x, create_graph=True)
    return g.norm() + total(f(x, y))


@pytest.mark.parametrize("transform", ["backward", "double_backward", "grad", "grad_grad", "vmap_grad"])
@pytest.mark.parametrize("function", [gradient_of_intermediate, gradient_norm])
def test_autograd_grad_inside(function, transform):
    args = tensor(3), tensor(3, seed=1)
    want = observe(transform, function, args)  # plain torch allows these
    assert_same(observe(transform, remat(function), args), want)


def test_backward_call_inside():
    """A function that trains a little something on the way."""

    def fit(x, y):
        with torch.enable_grad():
            w = torch.zeros(3, dtype=F64, requires_grad=True)
            for _ in range(3):
                ((w - x.detach()) ** 2).sum().backward()
                with torch.no_grad():
                    w -= 0.1 * w.grad
                w.grad = None
        return w.detach() * x * y

    args = tensor(3), tensor(3, seed=1)
    for transform in ("eager", "backward"):
        assert_same(observe(transform, remat(fit), args), observe(transform, fit, args))


# ---------------------------------------------------------------- custom autograd Functions
# inside f


class WithVmap(torch.autograd.Function):
    """With its own vmap rule, and a gradient that is deliberately not the derivative (a straight-
    through estimator).
    """

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, ct):
        return ct * 2

    @staticmethod
    def jvp(ctx, t):
        return t * 2

    @staticmethod
    def vmap(info, in_dims, x):
        return WithVmap.apply(x), in_dims[0]


class Legacy(torch.autograd.Function):
    """Without setup_context: torch.func refuses it, plain eager does not."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, (x > 0)

    @staticmethod
    def backward(ctx, ct, _):
        x, y = ctx.saved_tensors
        return ct * y, ct * x


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("inside", ["forward", "forward and backward"])
def test_cached_parametrizations(inside):
    """A recurrent cell, as torch's documentation of `parametrize.cached` has it."""
    cell = nn.RNNCell(3, 3, dtype=F64)
    runs = []

    class Sine(nn.Module):
        def forward(self, w):
            runs.append(None)
            return w.sin()

    parametrize.register_parametrization(cell, "weight_hh", Sine())
    xs = [tensor(2, 3, seed=i) for i in range(4)]

    def loss(f):
        h = tensor(2, 3, seed=9)
        for x in xs:
            h = f(x, h)
        return h.sum()

    def run(wrap):
        f = wrap(cell)
        bare = wrap(lambda p, x, h: functional_call(cell, p, (x, h)))
        with parametrize.cached():  # torch takes what it has cached for other parameters, too
            func = grad(lambda p: loss(lambda x, h: bare(p, x, h)))(dict(cell.named_parameters()))
        with parametrize.cached():
            y = loss(f)
            if inside == "forward and backward":
                eager = torch.autograd.grad(y, list(cell.parameters()))
        if inside == "forward":
            eager = torch.autograd.grad(y, list(cell.parameters()))
        return eager, func, parametrize._cache_enabled

    want = run(plain)
    runs.clear()
    assert_same(run(remat), want)
    assert len(runs) == 2 * 2 * len(xs), "once in each forward, and once in each recomputation"
    with parametrize.cached(), pytest.raises(ZeroDivisionError):
        remat(lambda x: cell(x, x) / (1 // 0))(xs[0])
    assert parametrize._cache_enabled == 0


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


def test_legacy_function_beside_a_tensor_in_a_dict_of_ones_own():
    found = AttributeDict(w=torch.randn(3, requires_grad=True))
    x = torch.randn(3, requires_grad=True)
    y = remat(lambda x: Legacy.apply(x.sin(), x)[0] * found.w)(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), found.w)[0], (x.sin() * x).detach())


@pytest.mark.parametrize("transform", EVERY)
@pytest.mark.parametrize("kind", ["inside", "itself", "straight_through"])
def test_custom_function(kind, transform):
    def make(wrap):
        if kind == "inside":
            return wrap(lambda x: sum(Cube.apply(x.sin(), x)))
        if kind == "itself":
            return lambda x: wrap(Cube.apply)(x, x.cos())
        return wrap(lambda x: WithVmap.apply(x * 3) * x)

    compare(lambda wrap: observe(transform, make(wrap), (tensor(3),)), remat)


@pytest.mark.parametrize("transform", EVERY)
def test_legacy_custom_function(transform):
    g = lambda x, y: Legacy.apply(x.sin(), y)[0] * x
    if transform in ("eager", "backward", "double_backward"):
        observe(transform, g, (tensor(3), tensor(3, seed=1)))  # plain torch allows it
    compare(lambda wrap: observe(transform, wrap(g), (tensor(3), tensor(3, seed=1))), remat)


def test_once_differentiable_still_refuses_the_second_derivative():
    def run(wrap):
        x = tensor(3, requires_grad=True)
        (g,) = torch.autograd.grad((wrap(lambda x: Once.apply(x * x))(x) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()
        return g.detach()

    assert_same(run(remat), run(plain))


# ---------------------------------------------------------------- modules


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", tensor(3, seed=5))
        self.register_buffer("hidden", tensor(3, seed=6), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x):
        return self.linear(x) * self.scale + self.hidden.sin() + self.count


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([tensor(3, seed=7), tensor(3, seed=8)])
        self.dict = nn.ParameterDict({"a": tensor(3, seed=9)})
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.by_name = nn.ModuleDict({"norm": nn.LayerNorm(3)})

    def forward(self, x):
        for p, layer in zip(self.list, self.layers):
            x = torch.tanh(layer(x) * p)
        return self.by_name["norm"](x) * self.dict["a"]


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.layer.register_forward_hook(lambda module, args, out: out * 2)
        self.layer.register_forward_pre_hook(lambda module, args: (args[0].sin(),))

    def forward(self, x):
        return self.layer(x)


class Delegating(nn.Module):
    """Uses parameters by other ways than attributes of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        weight_, bias = self.layer.parameters()
        named = dict(self.named_parameters())
        return nn.functional.linear(x, weight_, bias) * named["layer.bias"] + self.layer._parameters["bias"]


def with_parametrization():
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), layer)


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 3)),
    "tied": Tied,
    "buffers": Buffers,
    "containers": Containers,
    "parametrized": with_parametrization,
    "spectral_norm_eval": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
    "batchnorm_eval": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(),
    "hooked": Hooked,
    "delegating": Delegating,
}


def build(name):
    torch.manual_seed(3)
    return MODULES[name]().double()


class Block(nn.Module):
    """A module that remats its own child: what a user writes into a model."""

    def __init__(self, wrap, child, how):
        super().__init__()
        self.wrap, self.child, self.how = wrap, child, how
        if how == "at_init":
            self.run = wrap(child)

    def forward(self, x):
        if self.how == "at_init":
            return self.run(x)
        if self.how == "module":
            return self.wrap(self.child)(x)
        if self.how == "method":
            return self.wrap(self.child.forward)(x)
        if self.how == "lambda":
            return self.wrap(lambda x: self.child(x))(x)
        if self.how == "argument":
            return self.wrap(lambda child, x: child(x))(self.child, x)
        return self.wrap(self._inner)(x)

    def _inner(self, x):
        return self.child(x)


HOW = ["at_init", "module", "method", "lambda", "argument", "own_method"]
FUNCTIONAL = [name for name in EVERY if name != "grad_grad"]


def poisoned(module):
    """The module's tensors by name, once each; the module itself keeps NaN."""
    params = {k: v.detach().clone() for k, v in module.named_parameters()}
    buffers = {k: v.detach().clone() for k, v in module.named_buffers()}
    with torch.no_grad():
        for p in [*module.parameters(), *module.buffers()]:
            p.fill_(float("nan") if p.is_floating_point() else -1)
    return params, buffers


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("transform", FUNCTIONAL)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODULES)
def test_functional_call_with_poisoned_originals(name, how, transform):
    """The recomputation comes after functional_call has put the (poisoned) originals back."""

    def run(wrap):
        model = Block(wrap, build(name), how)
        params, buffers = poisoned(model)
        call = lambda params, buffers, x: functional_call(model, {**params, **buffers}, (x,))
        if name.startswith(("batchnorm", "spectral_norm")):  # torch does not differentiate their buffers
            state = buffers
            call = lambda params, _, x: functional_call(model, {**params, **state}, (x,))
            buffers = {}
        out = observe(transform, call, (params, buffers, tensor(2, 3)))
        assert all(leaf.isfinite().all() for leaf in tree_leaves(out) if torch.is_tensor(leaf))
        return out

    compare(run, remat)


@pytest.mark.parametrize("transform", FUNCTIONAL)
# "parametrized" holds one module twice, and functional_call leaves such a module with the tensors
# that it was given: the checkpoint sees them escape, and says so.
@pytest.mark.parametrize("name", ["mlp", "tied", "buffers"])
def test_functional_call_inside_remat(name, transform):
    def run(wrap):
        model = build(name)
        params, buffers = poisoned(model)
        call = wrap(lambda params, buffers, x: functional_call(model, (params, buffers), (x,)))
        return observe(transform, call, (params, buffers, tensor(2, 3)))

    compare(run, remat)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODULES)
def test_parameters_get_their_gradient_in_plain_eager(name, how):
    """`.grad` of each parameter, and None where plain torch leaves None."""

    def run(wrap):
        model = Block(wrap, build(name), how)
        x = tensor(2, 3, requires_grad=True)
        out = model(x)
        total(out).backward()
        return out.detach(), x.grad, {k: p.grad for k, p in model.named_parameters()}

    compare(run, remat)


def test_frozen_parameters():
    def run(wrap):
        model = build("mlp")
        for p in model[0].parameters():
            p.requires_grad_(False)
        x = tensor(2, 3)
        total(wrap(model)(x)).backward()
        return [p.grad for p in model.parameters()]

    assert_same(run(remat), run(plain))
    model = build("mlp").requires_grad_(False)
    assert not remat(model)(tensor(2, 3)).requires_grad


def test_pullback_called_after_functional_call_returned():
    def run(wrap):
        model = Block(wrap, build("tied"), "module")
        params, _ = poisoned(model)
        out, pull = vjp(lambda params, x: functional_call(model, params, (x,)), params, tensor(2, 3))
        return out, pull(weight(out)), vmap(pull)(torch.stack([weight(out), out]))

    assert_same(run(remat), run(plain))


@pytest.mark.parametrize("tie_weights", [True, False])
def test_tied_weights_in_functional_call(tie_weights):
    def run(wrap):
        model = Block(wrap, build("tied"), "module")
        first = {"child.encode.weight": tensor(3, 3, seed=11)}
        call = lambda p: total(functional_call(model, p, (tensor(2, 3),), tie_weights=tie_weights))
        return grad(call)(first)

    assert_same(run(remat), run(plain))


def test_ensemble_of_stacked_modules():
    def run(wrap):
        models = [build("mlp") for _ in range(3)]
        for i, m in enumerate(models):
            for p in m.parameters():
                p.data.mul_(1 + 0.1 * i)
        params, buffers = stack_module_state(models)
        base = Block(wrap, copy.deepcopy(models[0]).to("meta"), "module")
        name = lambda d: {f"child.{k}": v for k, v in d.items()}
        call = lambda p, b, x: total(functional_call(base, (name(p), name(b)), (x,)))
        params = {k: v.detach() for k, v in params.items()}
        x = tensor(4, 2, 3)
        per_model = vmap(grad(call), (0, 0, None))(params, buffers, x[0])
        per_sample = vmap(vmap(grad(call), (None, None, 0)), (0, 0, None))(params, buffers, x)
        return per_model, per_sample

    assert_same(run(remat), run(plain))


def test_module_stays_as_it_is():
    """remat of a module leaves nothing on it: no attribute, no hook, the same parameter objects."""
    model = build("mlp")
    before = (
        list(map(id, model.parameters())),
        {k: set(m.__dict__) for k, m in model.named_modules()},
    )
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    total(remat(model)(tensor(2, 3))).backward()
    grad(lambda x: total(remat(model)(x)))(tensor(2, 3))
    assert before == (
        list(map(id, model.parameters())),
        {k: set(m.__dict__) for k, m in model.named_modules()},
    )
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(type(p) is nn.Parameter and vars(p) == {} for p in model.parameters())
