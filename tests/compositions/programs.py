"""Random programs as source text, and random stacks of transforms around them.

`draw(seed)` gives a `Program`: the text of a function `program(x, w)` that calls `remat` in the
ways people do (on local functions that capture tensors from every level around them, in cells,
defaults, containers, attributes and globals; on partials, callable objects, bound methods and
modules, also out of torch's own database; nested; under torch.func transforms inside) and the names
of the transforms around it. Afterwards it rebinds what was captured: variables, items, attributes,
parts of modules. Plain autograd does not notice that, since the forward is over, so the program
without remat is the reference. Text, because a program that fails must be readable, runnable and
shrinkable.
"""

import copy
import functools
import random
import re
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .functions import Cube, Pair
from .stacks import scalar, stack

VECTOR, MATRIX, NUMBER = "v", "m", "s"


class Holder:
    """Something with attributes."""


class Affine:
    """A callable object that holds tensors and is no module."""

    def __init__(self, m, v):
        self.m, self.v = m, v

    def __call__(self, x):
        return torch.tanh(self.m @ x) + self.v

    def method(self, x, scale=1.0):
        return torch.sin(self.m @ x) * self.v * scale


class Net(nn.Module):
    """A module whose forward remats its own linear layer, for functional_call."""

    def __init__(self, remat):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 3))
        self.remat = remat
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        self.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.remat(self.linear)(x)) * self.scale


class Part(nn.Module):
    """A module with all that may be rebound after its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.9, 9).reshape(3, 3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 3))
        self.act = nn.Tanh()
        self.factor, self.items, self.extra = 0.7, [1.2, {"k": 0.4}], None

    def forward(self, x):
        x = self.act(self.weight @ x * self.factor) * self.scale + self.items[1]["k"]
        if self.training:
            x = x * self.items[0]
        return x if self.extra is None else x + self.extra


# What becomes of a part after a call of it; {} is the part.
REBINDINGS = (
    "{}.eval()",
    "{}.act = nn.Sigmoid()",
    "{}.factor = 0.3",
    "{}.items[0] = -0.4",
    "{}.items = [0.1, {{'k': -1.0}}]",
    "{}.items[1]['k'] = 2.0",
    "{}.scale = torch.ones(3)",
    "{}.extra = constant",
    "{}.weight = nn.Parameter(torch.eye(3), requires_grad=False)",
    "{}.forward = torch.cos",
    "{}.act.forward = torch.cos",
    "{}.act.register_forward_hook(lambda module, args, out: out * 0.5)",
)


def doubled(forward):
    """The forward of a module, patched as libraries do."""

    @functools.wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **kwargs) * 2

    return call


# Of torch's database, what plain torch takes under every transform and runs alike each time.
MODULES = (
    "Linear Bilinear Conv1d Conv2d ConvTranspose1d LayerNorm RMSNorm GroupNorm InstanceNorm1d PReLU "
    "RNNCell GRUCell LSTMCell RNN GRU LSTM MultiheadAttention Embedding CrossEntropyLoss MaxPool2d"
).split()


@functools.cache
def from_the_database():
    """The first sample of each of `MODULES`, and what to call it with."""
    from torch.testing._internal.common_modules import module_db

    found = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for info in module_db:
            if (name := info.name.removeprefix("nn.")) in MODULES:
                sample = info.module_inputs_func(info, "cpu", torch.float64, False, True)[0]
                made, given = sample.constructor_input, sample.forward_input
                module = info.module_cls(*made.args, **made.kwargs).to(torch.float64)
                found[name] = module.requires_grad_(False), given.args, given.kwargs
    return found


class Around(nn.Module):
    """Calls remat on a module that it holds, for functional_call."""

    def __init__(self, net, remat):
        super().__init__()
        self.net, self.remat = net, remat

    def forward(self, *args, **kwargs):
        return self.remat(self.net)(*args, **kwargs)


def module_call(net, a, b, remat=lambda f: f):
    """A module of the database, its parameters scaled by a and its inputs by b, as a vector."""
    _, args, kwargs = from_the_database()[type(net).__name__]
    parameters = {f"net.{key}": p * (1 + 0.1 * a.mean()) for key, p in net.named_parameters()}
    moved = [
        t * (1 + 0.1 * b.mean()) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in pytree.tree_leaves(args)
    ]
    args = pytree.tree_unflatten(moved, pytree.tree_structure(args))
    return scalar(functional_call(Around(net, remat), parameters, args, kwargs)).sin() * a


@dataclass(frozen=True)
class Program:
    seed: int
    source: str
    stack: tuple

    def run(self, remat, x, w):
        if "module_of" in self.source:
            from_the_database()  # not under a transform
        namespace = dict(
            nn=nn,
            Part=Part,
            doubled=doubled,
            module_call=module_call,
            module_of=lambda name: copy.copy(from_the_database()[name][0]),
            torch=torch,
            F=F,
            func=torch.func,
            functools=functools,
            functional_call=functional_call,
            remat=remat,
            scalar=scalar,
            Cube=Cube,
            Pair=Pair,
            Holder=Holder,
            Affine=Affine,
            net=Net(remat),
            constant=torch.linspace(0.3, 0.9, 3),
        )
        exec(compile(self.source, f"<program {self.seed}>", "exec"), namespace)
        return stack(*self.stack)(namespace["program"])(x, w)

    def __str__(self):
        return f"# seed {self.seed}, under {' of '.join(self.stack)}\n{self.source}"


SAFE_WITH_RANDOM = (
    "grad_x grad_both grad_tree grad_aux value_and_grad vjp_pull vjp_twice vjp_vmap jacrev_x "
    "jacrev_both jvp_x jvp_both jvp_tangent jacfwd_same jacfwd_different vmap_different "
    "vmap_same vmap_different_unbatched vmap_same_unbatched"
).split()
WITHOUT_RANDOM = [
    *SAFE_WITH_RANDOM,
    *"vmap_x vmap_w vmap_dims vmap_nested vmap_chunk jacfwd_x hessian_x".split(),
]
EAGER = (
    "forward backward backward_twice backward_through_non_leaves eager_grad double_backward "
    "grads_batched dual_both jacobian jacobian_vectorized backward_one_input no_grad"
).split()
HEAVY = {
    "jacrev_both",
    "hessian_x",
    "jacfwd_same",
    "jacrev_x",
    "jacfwd_x",
    "vjp_vmap",
    "vmap_nested",
    "double_backward",
}


def draw(seed):
    return Writer(random.Random(seed)).program(seed)


class Scope:
    """What a function body may name: expressions by kind, its own names, and what encloses it."""

    def __init__(self, outer=None):
        self.kinds = {k: list(outer.kinds[k]) if outer else [] for k in (VECTOR, MATRIX, NUMBER)}
        # What this body may rebind: what others have made would be a side effect.
        self.own = []
        self.rebindings = []

    def add(self, kind, expression, rebindable=False):
        self.kinds[kind].append(expression)
        if rebindable:
            self.own.append((kind, expression))


class Writer:
    def __init__(self, rng):
        self.rng = rng
        self.lines = []
        self.indent = 0
        self.names = 0
        self.uses_random = False
        self.uses_custom = False

    # Text

    def emit(self, text):
        self.lines.append("    " * self.indent + text)

    def name(self, prefix="t"):
        self.names += 1
        return f"{prefix}{self.names}"

    def pick(self, scope, kind):
        """Any expression of a kind; what was made last is likelier, so that a program hangs
        together.
        """
        options = scope.kinds[kind]
        return self.rng.choice(options[-2:] if self.rng.random() < 0.5 else options)

    def let(self, scope, kind, text):
        name = self.name()
        self.emit(f"{name} = {text}")
        scope.add(kind, name, rebindable=True)
        return name

    # Programs

    def program(self, seed):
        rng = self.rng
        self.allow_random = rng.random() < 0.35
        self.emit("def program(x, w):")
        self.indent += 1
        scope = Scope()
        scope.add(VECTOR, "x")
        scope.add(MATRIX, "w")
        scope.add(NUMBER, "x.sum()")
        scope.add(VECTOR, "constant")
        self.statements(scope, rng.randint(2, 5), depth=3)
        self.call(scope, depth=3)
        if rng.random() < 0.5:
            self.statements(scope, rng.randint(1, 3), depth=2)
        self.emit(f"return {self.result(scope)}")
        depth = rng.choices((1, 2, 3, 4), (2, 4, 3, 1))[0]
        names = SAFE_WITH_RANDOM if self.uses_random else WITHOUT_RANDOM
        chosen = []
        while len(chosen) < depth:
            name = rng.choice(names)
            if name in HEAVY and sum(n in HEAVY for n in chosen) >= 2:
                continue
            chosen.append(name)
        if rng.random() < 0.35:
            chosen[0] = rng.choice(EAGER)
            if chosen[0] in (
                "backward_twice",
                "double_backward",
                "eager_grad",
                "grads_batched",
                "backward_one_input",
            ):
                chosen[1:] = [n for n in chosen[1:] if n != "jvp_tangent"]
            if chosen[0].startswith("jacobian"):  # with two heavy ones inside it takes minutes
                heavy = [n for n in chosen[1:] if n in HEAVY]
                chosen[1:] = [n for n in chosen[1:] if n not in heavy[1:]]
        elif not self.uses_random and not self.uses_custom and rng.random() < 0.08:
            chosen[0] = "functionalized"
        return Program(seed, "\n".join(self.lines) + "\n", tuple(chosen))

    def result(self, scope):
        v, s = f"{scope.kinds[VECTOR][-1]} * {self.pick(scope, VECTOR)}", self.pick(scope, NUMBER)
        return self.rng.choice(
            (
                v,
                f"({v}, {s})",
                f"{{'a': {v}, 'b': [{self.pick(scope, VECTOR)}, {s}]}}",
                f"Pair({v} + {s}, ({s},))",
            )
        )

    def statements(self, scope, count, depth):
        for _ in range(count):
            kinds = [
                self.unary,
                self.binary,
                self.reshape,
                self.linear,
                self.hide,
                self.in_place,
                self.special,
                self.knob,
                self.part,
                self.loop,
                self.database,
                self.rebind,
            ]
            weights = [3, 4, 3, 3, 3, 1, 2, 2, 2, 1, 1, 5]
            if depth > 0:
                kinds.append(self.call)
                weights.append(6)
            if self.allow_random:
                kinds.append(self.noise)
                weights.append(3)
            statement = self.rng.choices(kinds, weights)[0]
            statement(scope, depth)

    # Statements

    def unary(self, scope, depth):
        kind = self.rng.choice((VECTOR, VECTOR, MATRIX, NUMBER))
        f = self.rng.choice(
            (
                "torch.sin({})",
                "torch.tanh({})",
                "{}.cos()",
                "torch.sigmoid({})",
                "F.silu({})",
                "F.softplus({})",
                "-{} * 0.7",
                "torch.exp(-{0} * {0})",
                "{}.abs()",
                "{} ** 2 * 0.3",
                "F.gelu({})",
                "{}.clone()",
                "F.mish({})",
            )
        )
        self.let(scope, kind, f.format(self.pick(scope, kind)))

    def binary(self, scope, depth):
        kind = self.rng.choice((VECTOR, VECTOR, MATRIX, NUMBER))
        a = self.pick(scope, kind)
        b = self.pick(scope, self.rng.choice((kind, NUMBER)))
        f = self.rng.choice(("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "{} / (1 + {}.abs())"))
        if "maximum" in f:
            b = self.pick(scope, kind)
        self.let(scope, kind, f.format(a, b))

    def linear(self, scope, depth):
        m, n, v = self.pick(scope, MATRIX), self.pick(scope, MATRIX), self.pick(scope, VECTOR)
        kind, text = self.rng.choice(
            (
                (VECTOR, f"{m} @ {v}"),
                (VECTOR, f"{m} @ {v}"),
                (VECTOR, f"F.linear({v}, {m}, {self.pick(scope, VECTOR)})"),
                (MATRIX, f"{m} @ {n} * 0.3"),
                (MATRIX, f"torch.outer({v}, {self.pick(scope, VECTOR)})"),
                (NUMBER, f"{v} @ {self.pick(scope, VECTOR)}"),
                (VECTOR, f"torch.linalg.solve({m} @ {m}.mT + 2 * torch.eye(3), {v})"),
            )
        )
        self.let(scope, kind, text)

    def reshape(self, scope, depth):
        m, v, s, i = (
            self.pick(scope, MATRIX),
            self.pick(scope, VECTOR),
            self.pick(scope, NUMBER),
            self.rng.randrange(3),
        )
        kind, text = self.rng.choice(
            (
                (MATRIX, f"{m}.t()"),
                (VECTOR, f"{m}.sum(0)"),
                (VECTOR, f"{m}[{i}]"),
                (VECTOR, f"{m}.diagonal()"),
                (NUMBER, f"{v}[{i}]"),
                (NUMBER, f"{v}.mean()"),
                (NUMBER, f"{m}.max()"),
                (VECTOR, f"{v}.flip(0)"),
                (VECTOR, f"torch.stack([{s}, {v}[{i}], {s}])"),
                (MATRIX, f"{v}.expand(3, 3)"),
                (VECTOR, f"torch.cat([{v}[1:], {v}[:1]])"),
                (VECTOR, f"{v}.sort().values"),
                (MATRIX, f"{m}[{v}.argsort()]"),
                (VECTOR, f"{v}.detach()"),
                (VECTOR, f"torch.where({v} > 0.1, {v}, {self.pick(scope, VECTOR)})"),
            )
        )
        self.let(scope, kind, text)

    def special(self, scope, depth):
        v, m = self.pick(scope, VECTOR), self.pick(scope, MATRIX)
        choice = self.rng.randrange(7)
        if choice == 0:
            self.uses_custom = True
            self.let(
                scope,
                VECTOR,
                f"Cube.apply({v}, {self.pick(scope, VECTOR)})[{self.rng.randrange(2)}] * 0.1",
            )
        elif choice == 1:
            self.let(scope, VECTOR, f"torch.cumprod({v}, 0)")
        elif choice == 2:
            self.let(scope, VECTOR, f"torch.softmax({v}, 0)")
        elif choice == 3:
            self.let(scope, MATRIX, f"F.layer_norm({m}, (3,))")
        elif choice == 4:
            b = self.pick(scope, VECTOR)
            self.let(
                scope,
                VECTOR,
                f"functional_call(net, {{'linear.weight': {m}, 'scale': {b}}}, ({v},))",
            )
        elif choice == 5:
            self.let(scope, VECTOR, f"remat(Affine({m}, {v}))({self.pick(scope, VECTOR)})")
        else:
            s = self.pick(scope, NUMBER)
            self.let(
                scope,
                VECTOR,
                f"remat(Affine({m}, {v}).method)({self.pick(scope, VECTOR)}, scale={s})",
            )

    def noise(self, scope, depth):
        self.uses_random = True
        v = self.pick(scope, VECTOR)
        f = (
            "{} * torch.rand_like({})",
            "{} + torch.randn(3) * 0.3",
            "F.dropout({}, 0.5)",
            "{} * torch.bernoulli(torch.full((3,), 0.5))",
        )
        self.let(scope, VECTOR, self.rng.choice(f).format(v, v))

    def in_place(self, scope, depth):
        a, b = self.pick(scope, VECTOR), self.pick(scope, VECTOR)
        name = self.name()
        writes = (f".add_({b})", ".sin_()", f".mul_({a}).cos_()", f"[0] = {name}[1] * 2", "[1:].tanh_()")
        written = self.rng.choice(
            (*writes, "(g if {} > 0 else h).mul_(3)", "(g, h)[{} > 0].sin_()", "if {} > 0: h.mul_(3)")
        )
        if written in writes:
            self.emit(f"{name} = {a} * {b}")
            self.emit(f"{name}{written}")
        else:
            self.flag_chooses(scope, name, a, written)
        scope.add(VECTOR, name, rebindable=True)

    def flag_chooses(self, scope, name, a, written):
        """Two calls of the same code, in which a number tells what is written to."""
        f, k, m = self.name("f"), self.name("k"), self.pick(scope, MATRIX)
        given = self.rng.random() < 0.5
        self.emit(f"def {f}(a{f', {k}' if given else ''}):")
        self.emit(f"    g, h = {m} @ a, a @ {m}")
        self.emit(f"    {written.format(k)}")
        self.emit("    return g.sin() * h.sin()")
        self.emit(f"{name} = {a}")
        self.emit(f"for {k} in (0.5, -1.5):")
        self.emit(f"    {name} = {name} + remat({f})({name}{f', {k}' if given else ''})")

    def hide(self, scope, depth):
        """Put a tensor where a captured function finds it another way than by a cell, or give a
        name another value.
        """
        kind = self.rng.choice((VECTOR, VECTOR, MATRIX))
        a, b = self.pick(scope, kind), self.pick(scope, kind)
        choice = self.rng.randrange(5)
        if choice == 2 and self.indent > 1:  # writing a global inside a function would be a side effect
            choice = 0
        name = self.name({0: "box", 1: "holder", 2: "G", 3: "deep", 4: "t"}[choice])
        if choice == 0:
            self.emit(f"{name} = [{a}, {{'k': {b} * 0.5}}]")
            scope.add(kind, f"{name}[1]['k']", rebindable=True)
        elif choice == 1:
            self.emit(f"{name} = Holder()")
            self.emit(f"{name}.t = {a} * 0.8")
            scope.add(kind, f"{name}.t", rebindable=True)
        elif choice == 2:
            self.emit(f"global {name}")
            self.emit(f"{name} = {a} + {b}")
            scope.add(kind, name, rebindable=True)
        elif choice == 3:
            self.emit(f"{name} = Holder()")
            self.emit(f"{name}.inner = {{'t': (Pair({a}, {b}.cos()),)}}")
            scope.add(kind, f"{name}.inner['t'][0].right")
        elif scope.own:
            kind, old = self.rng.choice(scope.own)
            self.emit(f"{old} = {old} * 0.9")

    # What is rebound after a call

    def rebind(self, scope, depth):
        if scope.rebindings and self.rng.random() < 0.7:
            self.emit(self.rng.choice(scope.rebindings))
        elif scope.own:
            kind, old = self.rng.choice(scope.own)
            self.emit(f"{old} = {self.pick(scope, kind)} * 0.9")

    def rebound(self, scope, *texts):
        """What may be rebound from here on: some at once, some later or never."""
        now = self.rng.randrange(min(len(texts), 3) + 1)
        chosen = self.rng.sample(texts, min(len(texts), 4))
        for text in chosen[:now]:
            self.emit(text)
        scope.rebindings += chosen[now:]

    def knob(self, scope, depth):
        """A number, a function or a name in some place, and a call that reads it."""
        place, n = self.name("k"), self.rng.randrange(3)
        if n == 0:
            target = place
        elif n == 1:
            self.emit(f"{place} = Holder()")
            target = f"{place}.k"
        else:
            self.emit(f"{place} = {{'k': [None]}}")
            target = f"{place}['k'][0]"
        first, then, use = self.rng.choice(
            (
                ("0.7", "-1.3", "a * {}"),
                ("torch.sin", "torch.exp", "{}(a)"),
                ("'cos'", "'exp'", "getattr(torch, {})(a)"),
                ("True", "False", "a.sin() if {} else a.cos()"),
                ("nn.Tanh()", "nn.Sigmoid()", "{}(a)"),
                ("slice(0, 2)", "slice(1, 3)", "a[{}].sum() * a"),
            )
        )
        self.emit(f"{target} = {first}")
        v, u = self.pick(scope, VECTOR), self.pick(scope, VECTOR)
        self.let(scope, VECTOR, f"remat(lambda a: {use.format(target)} * {u})({v})")
        self.rebound(scope, f"{target} = {then}")

    def part(self, scope, depth):
        """A module, called in one of several ways."""
        part = self.name("part")
        self.emit(f"{part} = Part()")
        if self.rng.random() < 0.3:
            self.emit(f"{part}.forward = doubled({part}.forward)")
        v, u, m = self.pick(scope, VECTOR), self.pick(scope, VECTOR), self.pick(scope, MATRIX)
        text = (
            f"remat({part})({v})",
            f"remat(lambda a: {part}(a) * {u})({v})",
            f"remat(functools.partial({part}.forward))({v})",
            f"remat(lambda p, a: functional_call({part}, {{'weight': p}}, (a,)))({m}, {v})",
            f"remat(lambda a: functional_call({part}, {{'weight': {m}, 'scale': {u}}}, (a,)))({v})",
            f"remat(nn.Sequential({part}, nn.Tanh(), {part}))({v})",
        )
        self.let(scope, VECTOR, self.rng.choice(text))
        self.rebound(scope, *[text.format(part) for text in REBINDINGS], f"{part}.extra = {u}")

    def loop(self, scope, depth):
        i, u = self.name("i"), self.pick(scope, VECTOR)
        name = self.let(scope, VECTOR, self.pick(scope, VECTOR))
        self.emit(f"for {i} in (0.5, -1.5):")
        self.emit(f"    {name} = remat(lambda a: torch.sin(a * {i}) + {u})({name})")

    def database(self, scope, depth):
        """A module of torch's database. The parameters are put in inside of remat, or around it."""
        net, name = self.name("net"), self.rng.choice(MODULES)
        v, u = self.pick(scope, VECTOR), self.pick(scope, VECTOR)
        self.emit(f"{net} = module_of('{name}')")
        text = (
            f"remat(lambda a, b: module_call({net}, a, b))({v}, {u})",
            f"module_call({net}, {v}, {u}, remat)",
        )
        self.let(scope, VECTOR, self.rng.choice(text))
        self.rebound(scope, f"{net}.eval()", f"{net}.forward = None")

    # Local functions and the ways to call them

    def define(self, scope, kinds, depth, returns=VECTOR):
        """A local function with parameters of some kinds; returns its name."""
        rng = self.rng
        f = self.name("f")
        parameters = [self.name("p") for _ in kinds]
        default = None
        if rng.random() < 0.3:
            default = self.name("d")
        text = ", ".join(parameters + ([f"{default}={self.pick(scope, VECTOR)}"] if default else []))
        self.emit(f"def {f}({text}):")
        self.indent += 1
        inner = Scope(scope)
        if not any(k == VECTOR for k in kinds) or default:
            inner.add(VECTOR, default or self.pick(scope, VECTOR))
        for kind, p in zip(kinds, parameters):
            if kind == "tree":
                inner.add(VECTOR, f"{p}['a']")
                inner.add(MATRIX, f"{p}['b'][0]")
            else:
                inner.add(kind, p)
        self.statements(inner, rng.randint(1, 4), depth - 1)
        if returns == VECTOR:
            self.emit(f"return {self.pick(inner, VECTOR)} * {self.pick(inner, VECTOR)}")
        elif returns == NUMBER:
            self.emit(f"return ({self.pick(inner, VECTOR)} * {self.pick(inner, VECTOR)}).sum()")
        else:
            v, m, s = (self.pick(inner, k) for k in (VECTOR, MATRIX, NUMBER))
            self.emit(
                f"return {{'v': {v}, 'rest': ({m}, None, [{s}, {self.pick(inner, VECTOR)}.argsort()])}}"
            )
        self.indent -= 1
        return f

    def call(self, scope, depth):
        rng = self.rng
        R = "remat({})" if rng.random() < 0.85 else "{}"
        v, u, m = self.pick(scope, VECTOR), self.pick(scope, VECTOR), self.pick(scope, MATRIX)
        randomness = "randomness='" + rng.choice(("different", "same")) + "'"
        choice = rng.randrange(11)
        if choice in (0, 1):
            f = self.define(scope, (VECTOR, MATRIX), depth)
            self.let(scope, VECTOR, f"{R.format(f)}({v}, {m})")
        elif choice == 2:
            f = self.define(scope, ("tree",), depth, returns="tree")
            out = self.name("out")
            self.emit(f"{out} = {R.format(f)}({{'a': {v}, 'b': ({m}, 'text')}})")
            scope.add(VECTOR, f"{out}['v']")
            scope.add(MATRIX, f"{out}['rest'][0]")
            scope.add(NUMBER, f"{out}['rest'][2][0]")
        elif choice == 3:
            f = self.define(scope, (VECTOR, VECTOR), depth)
            self.let(scope, VECTOR, f"{R.format(f'functools.partial({f}, {v})')}({u})")
        elif choice == 4:
            f = self.define(scope, (), depth)
            self.let(scope, VECTOR, f"{R.format(f)}()")
        elif choice == 5:
            f = self.define(scope, (VECTOR,), depth)
            self.let(scope, VECTOR, f"{R.format(R.format(f))}({v}) + {R.format(f)}({u})")
        elif choice == 6:
            f = self.define(scope, (VECTOR,), depth, returns=NUMBER)
            self.let(scope, VECTOR, f"func.grad({R.format(f)})({v})")
        elif choice == 7:
            f = self.define(scope, (VECTOR, VECTOR), depth)
            self.let(scope, MATRIX, f"func.vmap({R.format(f)}, (0, None), {randomness})({m}, {v})")
        elif choice == 8:
            f = self.define(scope, (VECTOR, VECTOR), depth, returns=NUMBER)
            self.let(
                scope,
                MATRIX,
                f"func.vmap(func.grad({R.format(f)}, 1), (0, None), {randomness})({m}, {v})",
            )
        elif choice == 9:
            f = self.define(scope, (VECTOR,), depth)
            out = self.name("out")
            self.emit(f"{out} = func.jvp({R.format(f)}, ({v},), ({u},))")
            scope.add(VECTOR, f"{out}[0]")
            scope.add(VECTOR, f"{out}[1]")
        else:
            f = self.define(scope, (VECTOR,), depth)
            self.let(scope, MATRIX, f"func.jacrev({R.format(f)})({v})")


def shrink(program, fails):
    """The same failure with as few lines, levels and statements as a greedy search finds."""
    progress = True
    while progress:
        progress = False
        for i in range(len(program.stack)):
            smaller = Program(program.seed, program.source, program.stack[:i] + program.stack[i + 1 :])
            if fails(smaller):
                program, progress = smaller, True
                break
        i = len(program.source.splitlines())
        while (i := i - 1) > 0:
            lines = program.source.splitlines()
            for instead in smaller_at(lines, i):
                smaller = Program(program.seed, "\n".join(instead) + "\n", program.stack)
                if fails(smaller):
                    program, progress = smaller, True
                    break
    return program


def smaller_at(lines, i):
    """The lines of a program without number i, or with something simpler in its place."""
    line = lines[i]
    width = len(line) - len(line.lstrip())
    end = i + 1
    while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > width:
        end += 1  # a def goes with its body
    yield lines[:i] + lines[end:]
    left, equals, right = line.partition(" = ")
    if equals and right not in ("x", "w", "constant"):
        for value in ("constant", "x", "w"):
            yield [*lines[:i], f"{left} = {value}", *lines[end:]]
    if "remat(" in line:
        yield [*lines[:i], line.replace("remat(", "(", 1), *lines[i + 1 :]]
    if " " in (value := right or line.strip().removeprefix("return ")):
        for name in dict.fromkeys(re.findall(r"\bt\d+\b", value)):
            yield [*lines[:i], line.replace(value, name), *lines[end:]]
