"""Random programs as source text, and random stacks of transforms around them.

`draw(seed)` gives a `Program`: the text of a function `program(x, w)` that calls `remat` in the
ways people do (on local functions that capture tensors from every level around them, in cells,
defaults, containers, attributes and globals; on partials, callable objects, bound methods and
modules; nested; under torch.func transforms inside) and the names
of the transforms around it. Afterwards it rebinds what was captured: variables, items, attributes,
parts of modules. Plain autograd does not notice that, since the forward is over, so the program
without remat is the reference. Text, because a program that fails must be readable and runnable.
"""

import functools
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from .functions import Cube, Pair
from .stacks import stack

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
        self.linear = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 3))
        self.remat = remat
        generator = torch.Generator().manual_seed(1)
        for p in self.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))

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
REBINDINGS = """
{}.eval()
{}.act = nn.Sigmoid()
{}.factor = 0.3
{}.items[0] = -0.4
{}.items = [0.1, {{'k': -1.0}}]
{}.items[1]['k'] = 2.0
{}.scale = torch.ones(3)
{}.extra = constant
{}.weight = nn.Parameter(torch.eye(3), requires_grad=False)
{}.forward = torch.cos
{}.act.forward = torch.cos
{}.act.register_forward_hook(lambda module, args, out: out * 0.5)
""".strip().splitlines()


def doubled(forward):
    """The forward of a module, patched as libraries do."""

    @functools.wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **kwargs) * 2

    return call


@dataclass(frozen=True)
class Program:
    seed: int
    source: str
    stack: tuple

    def run(self, remat, x, w):
        namespace = {
            **globals(),
            "F": F,
            "func": torch.func,
            "Cube": Cube,
            "Pair": Pair,
            "remat": remat,
            "functional_call": functional_call,
        }
        namespace |= {"net": Net(remat), "constant": torch.linspace(0.3, 0.9, 3)}
        exec(compile(self.source, f"<program {self.seed}>", "exec"), namespace)
        return stack(*self.stack)(namespace["program"])(x, w)

    def __str__(self):
        return f"# seed {self.seed}, under {' of '.join(self.stack)}\n{self.source}"


SAFE_WITH_RANDOM = (
    "grad_x grad_both grad_tree grad_aux value_and_grad vjp_pull vjp_twice vjp_vmap jacrev_x "
    "jacrev_both jvp_x jvp_both jvp_tangent jacfwd_same jacfwd_different vmap_different "
    "vmap_same vmap_different_unbatched vmap_same_unbatched"
).split()
WITHOUT_RANDOM = (
    SAFE_WITH_RANDOM + "vmap_x vmap_w vmap_dims vmap_nested vmap_chunk jacfwd_x hessian_x".split()
)
EAGER = (
    "forward backward backward_twice backward_through_non_leaves eager_grad double_backward "
    "grads_batched dual_both jacobian jacobian_vectorized backward_one_input no_grad"
).split()
HEAVY = "jacrev_both hessian_x jacfwd_same jacrev_x jacfwd_x vjp_vmap vmap_nested double_backward".split()
# They do not differentiate what is linear in the input alone.
NOT_LINEAR = "backward_twice double_backward eager_grad grads_batched backward_one_input".split()


# The statements: what they give, and the text, in which numbers stand for expressions.
UNARY = (
    "torch.sin({}) | torch.tanh({}) | {}.cos() | torch.sigmoid({}) | F.silu({}) | F.softplus({}) | "
    "-{} * 0.7 | torch.exp(-{0} * {0}) | {}.abs() | {} ** 2 * 0.3 | F.gelu({}) | {}.clone() | F.mish({})"
).split(" | ")
BINARY = "{} + {} | {} * {} | {} - {} | torch.maximum({}, {}) | {} / (1 + {}.abs())".split(" | ")
NOISE = (
    "{0} * torch.rand_like({0}) | {0} + torch.randn(3) * 0.3 | F.dropout({0}, 0.5) | "
    "{0} * torch.bernoulli(torch.full((3,), 0.5))"
).split(" | ")
LINEAR = (
    "mmvvvv",
    """
v {0} @ {2}
v {0} @ {2}
v F.linear({2}, {0}, {3})
m {0} @ {1} * 0.3
m torch.outer({2}, {4})
s {2} @ {5}
v torch.linalg.solve({0} @ {0}.mT + 2 * torch.eye(3), {2})
""",
)
RESHAPE = (
    "mvsiv",
    """
m {0}.t()
v {0}.sum(0)
v {0}[{3}]
v {0}.diagonal()
s {1}[{3}]
s {1}.mean()
s {0}.max()
v {1}.flip(0)
v torch.stack([{2}, {1}[{3}], {2}])
m {1}.expand(3, 3)
v torch.cat([{1}[1:], {1}[:1]])
v {1}.sort().values
m {0}[{1}.argsort()]
v {1}.detach()
v torch.where({1} > 0.1, {1}, {4})
""",
)
# A module, called in one of several ways.
PARTS = """
remat({part})({0})
remat(lambda a: {part}(a) * {1})({0})
remat(functools.partial({part}.forward))({0})
remat(lambda p, a: functional_call({part}, {{'weight': p}}, (a,)))({2}, {0})
remat(lambda a: functional_call({part}, {{'weight': {2}, 'scale': {1}}}, (a,)))({0})
remat(nn.Sequential({part}, nn.Tanh(), {part}))({0})
""".strip().splitlines()
# A value, another one, and what is computed of it.
KNOBS = """
0.7 | -1.3 | a * {}
torch.sin | torch.exp | {}(a)
'cos' | 'exp' | getattr(torch, {})(a)
True | False | a.sin() if {} else a.cos()
nn.Tanh() | nn.Sigmoid() | {}(a)
slice(0, 2) | slice(1, 3) | a[{}].sum() * a
""".strip().splitlines()
# How often each kind of statement is drawn.
WEIGHTS = dict(
    unary=3, binary=4, reshape=3, linear=3, hide=3, in_place=1, special=2, knob=2, part=2, loop=2,
    rebind=5, log=1,
)  # fmt: skip
draw = lambda seed: Writer(random.Random(seed)).program(seed)


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
        self.indent = self.names = 0
        self.uses_random = self.uses_custom = False

    # Text

    def emit(self, *texts):
        self.lines += ["    " * self.indent + text for text in texts]

    def name(self, prefix="t"):
        self.names += 1
        return f"{prefix}{self.names}"

    def pick(self, scope, kind):
        """Any expression of a kind; what was made last is likelier, so that a program hangs together."""
        options = scope.kinds[kind]
        return self.rng.choice(options[-2:] if self.rng.random() < 0.5 else options)

    def picks(self, scope, kinds):
        return [self.rng.randrange(3) if kind == "i" else self.pick(scope, kind) for kind in kinds]

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
        for kind, text in ((VECTOR, "x"), (MATRIX, "w"), (NUMBER, "x.sum()"), (VECTOR, "constant")):
            scope.add(kind, text)
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
            if name not in HEAVY or sum(n in HEAVY for n in chosen) < 2:
                chosen.append(name)
        if rng.random() < 0.35:
            chosen[0] = rng.choice(EAGER)
            if chosen[0] in NOT_LINEAR:
                chosen[1:] = [n for n in chosen[1:] if n != "jvp_tangent"]
            if chosen[0].startswith("jacobian"):  # with two heavy ones inside it takes minutes
                heavy = [n for n in chosen[1:] if n in HEAVY]
                chosen[1:] = [n for n in chosen[1:] if n not in heavy[1:]]
        elif not self.uses_random and not self.uses_custom and rng.random() < 0.08:
            chosen[0] = "functionalized"
        return Program(seed, "\n".join(self.lines) + "\n", tuple(chosen))

    def result(self, scope):
        v, s, u = f"{scope.kinds[VECTOR][-1]} * {self.pick(scope, VECTOR)}", *self.picks(scope, "sv")
        trees = v, f"({v}, {s})", f"{{'a': {v}, 'b': [{u}, {s}]}}", f"Pair({v} + {s}, ({s},))"
        return self.rng.choice(trees)

    def statements(self, scope, count, depth):
        weights = WEIGHTS | ({"call": 6} if depth > 0 else {}) | ({"noise": 3} if self.allow_random else {})
        for _ in range(count):
            (name,) = self.rng.choices([*weights], [*weights.values()])
            getattr(self, name)(scope, depth)

    # Statements

    def unary(self, scope, depth):
        kind = self.rng.choice((VECTOR, VECTOR, MATRIX, NUMBER))
        f = self.rng.choice(UNARY)
        self.let(scope, kind, f.format(self.pick(scope, kind)))

    def binary(self, scope, depth):
        kind = self.rng.choice((VECTOR, VECTOR, MATRIX, NUMBER))
        a = self.pick(scope, kind)
        b = self.pick(scope, self.rng.choice((kind, NUMBER)))
        f = self.rng.choice(BINARY)
        if "maximum" in f:
            b = self.pick(scope, kind)
        self.let(scope, kind, f.format(a, b))

    def linear(self, scope, depth, table=LINEAR):
        given = self.picks(scope, table[0])
        kind, text = self.rng.choice(table[1].strip().splitlines()).split(" ", 1)
        self.let(scope, kind, text.format(*given))

    def reshape(self, scope, depth):
        self.linear(scope, depth, RESHAPE)

    def special(self, scope, depth):
        v, m = self.picks(scope, "vm")
        choice = self.rng.randrange(7)
        simple = {1: f"torch.cumprod({v}, 0)", 2: f"torch.softmax({v}, 0)", 3: f"F.layer_norm({m}, (3,))"}
        if choice in simple:
            self.let(scope, MATRIX if choice == 3 else VECTOR, simple[choice])
            return
        u = self.pick(scope, VECTOR) if choice != 6 else self.pick(scope, NUMBER)
        if choice == 0:
            self.uses_custom = True
            text = f"Cube.apply({v}, {u})[{self.rng.randrange(2)}] * 0.1"
        elif choice == 4:
            text = f"functional_call(net, {{'linear.weight': {m}, 'scale': {u}}}, ({v},))"
        elif choice == 5:
            text = f"remat(Affine({m}, {v}))({u})"
        else:
            text = f"remat(Affine({m}, {v}).method)({self.pick(scope, VECTOR)}, scale={u})"
        self.let(scope, VECTOR, text)

    def noise(self, scope, depth):
        self.uses_random = True
        v = self.pick(scope, VECTOR)
        self.let(scope, VECTOR, self.rng.choice(NOISE).format(v))

    def in_place(self, scope, depth):
        a, b = self.picks(scope, "vv")
        name = self.name()
        writes = (f".add_({b})", ".sin_()", f".mul_({a}).cos_()", f"[0] = {name}[1] * 2", "[1:].tanh_()")
        chosen = ("(g if {} > 0 else h).mul_(3)", "(g, h)[{} > 0].sin_()", "if {} > 0: h.mul_(3)")
        written = self.rng.choice((*writes, *chosen))
        if written in writes:
            self.emit(f"{name} = {a} * {b}", f"{name}{written}")
        else:  # two calls of the same code, in which a number tells what is written to
            f, k, m = self.name("f"), self.name("k"), self.pick(scope, MATRIX)
            given = f", {k}" if self.rng.random() < 0.5 else ""
            self.emit(
                f"def {f}(a{given}):",
                f"    g, h = {m} @ a, a @ {m}",
                f"    {written.format(k)}",
                "    return g.sin() * h.sin()",
                f"{name} = {a}",
                f"for {k} in (0.5, -1.5):",
                f"    {name} = {name} + remat({f})({name}{given})",
            )
        scope.add(VECTOR, name, rebindable=True)

    def hide(self, scope, depth):
        """Put a tensor where f finds it another way than by a cell, or give a name another value."""
        kind = self.rng.choice((VECTOR, VECTOR, MATRIX))
        a, b = self.picks(scope, kind * 2)
        choice = self.rng.randrange(5)
        if choice == 2 and self.indent > 1:  # writing a global inside a function would be a side effect
            choice = 0
        name = self.name(("box", "holder", "G", "deep", "t")[choice])
        if choice == 0:
            self.emit(f"{name} = [{a}, {{'k': {b} * 0.5}}]")
            scope.add(kind, f"{name}[1]['k']", rebindable=True)
        elif choice == 1:
            self.emit(f"{name} = Holder()", f"{name}.t = {a} * 0.8")
            scope.add(kind, f"{name}.t", rebindable=True)
        elif choice == 2:
            self.emit(f"global {name}", f"{name} = {a} + {b}")
            scope.add(kind, name, rebindable=True)
        elif choice == 3:
            self.emit(f"{name} = Holder()", f"{name}.inner = {{'t': (Pair({a}, {b}.cos()),)}}")
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
        self.emit(*chosen[:now])
        scope.rebindings += chosen[now:]

    def knob(self, scope, depth):
        """A number, a function or a name in some place, and a call that reads it."""
        place, n = self.name("k"), self.rng.randrange(3)
        if n > 0:
            self.emit(f"{place} = " + ("Holder()", "{'k': [None]}")[n - 1])
        target = place + ("", ".k", "['k'][0]")[n]
        first, then, use = self.rng.choice(KNOBS).split(" | ")
        self.emit(f"{target} = {first}")
        v, u = self.picks(scope, "vv")
        self.let(scope, VECTOR, f"remat(lambda a: {use.format(target)} * {u})({v})")
        self.rebound(scope, f"{target} = {then}")

    def part(self, scope, depth):
        part = self.name("part")
        self.emit(f"{part} = Part()")
        if self.rng.random() < 0.3:
            self.emit(f"{part}.forward = doubled({part}.forward)")
        v, u, m = self.picks(scope, "vvm")
        self.let(scope, VECTOR, self.rng.choice(PARTS).format(v, u, m, part=part))
        self.rebound(scope, *[text.format(part) for text in REBINDINGS], f"{part}.extra = {u}")

    def log(self, scope, depth):
        """A call that stores a detached tensor outside of itself."""
        log, (v, u) = self.name("log"), self.picks(scope, "vv")
        self.emit(f"{log} = Holder()", f"{log}.t = None")
        store = f"setattr({log}, 't', a.detach() * {u}.detach())"
        self.let(scope, VECTOR, f"remat(lambda a: {store} or a * {u})({v})")
        scope.add(VECTOR, f"{log}.t")

    def loop(self, scope, depth):
        i, u = self.name("i"), self.pick(scope, VECTOR)
        name = self.let(scope, VECTOR, self.pick(scope, VECTOR))
        self.emit(f"for {i} in (0.5, -1.5):")
        self.emit(f"    {name} = remat(lambda a: torch.sin(a * {i}) + {u})({name})")

    # Local functions and the ways to call them

    def define(self, scope, kinds, depth, returns=VECTOR):
        """A local function with parameters of some kinds; returns its name."""
        rng = self.rng
        f = self.name("f")
        parameters = [self.name("p") for _ in kinds]
        default = self.name("d") if rng.random() < 0.3 else None
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
        if returns == "tree":
            v, m, s, u = self.picks(inner, "vmsv")
            self.emit(f"return {{'v': {v}, 'rest': ({m}, None, [{s}, {u}.argsort()])}}")
        else:
            v, u = self.picks(inner, "vv")
            self.emit(f"return {v} * {u}" if returns == VECTOR else f"return ({v} * {u}).sum()")
        self.indent -= 1
        return f

    def call(self, scope, depth):
        rng = self.rng
        R = "remat({})" if rng.random() < 0.85 else "{}"
        v, u, m = self.picks(scope, "vvm")
        randomness = "randomness='" + rng.choice(("different", "same")) + "'"
        way = rng.choice(CALLS)
        f = self.define(scope, way.kinds, depth, way.returns)
        wrapped = R.format(f"functools.partial({f}, {v})" if way.is_partial else f)
        text = way.text.format(wrapped, R.format(wrapped), v=v, u=u, m=m, randomness=randomness)
        if way.gives in (VECTOR, MATRIX):
            self.let(scope, way.gives, text)
            return
        out = self.name("out")
        self.emit(f"{out} = {text}")
        for place in way.gives.split():
            scope.add(place[0], out + place[1:])


class Way(NamedTuple):
    """How a local function is called: the kinds of its parameters, and what it returns and the call gives."""

    kinds: tuple
    text: str
    gives: str = VECTOR
    returns: str = VECTOR
    is_partial: bool = False


CALLS = (
    Way((VECTOR, MATRIX), "{0}({v}, {m})"),
    Way((VECTOR, MATRIX), "{0}({v}, {m})"),
    Way(("tree",), "{0}({{'a': {v}, 'b': ({m}, 'text')}})", "v['v'] m['rest'][0] s['rest'][2][0]", "tree"),
    Way((VECTOR, VECTOR), "{0}({u})", is_partial=True),
    Way((), "{0}()"),
    Way((VECTOR,), "{1}({v}) + {0}({u})"),
    Way((VECTOR,), "func.grad({0})({v})", returns=NUMBER),
    Way((VECTOR, VECTOR), "func.vmap({0}, (0, None), {randomness})({m}, {v})", MATRIX),
    Way((VECTOR, VECTOR), "func.vmap(func.grad({0}, 1), (0, None), {randomness})({m}, {v})", MATRIX, NUMBER),
    Way((VECTOR,), "func.jvp({0}, ({v},), ({u},))", "v[0] v[1]"),
    Way((VECTOR,), "func.jacrev({0})({v})", MATRIX),
)
