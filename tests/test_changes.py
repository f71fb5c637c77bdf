"""What a module refers to is changed after its forward: the gradient is that of the forward, or an error says so.

More of it in `PLACES` of test_contract.py.
"""

import copy
import dataclasses
import functools
import operator
import random
import sys
import types

import numpy as np
import pytest
import torch
from support import assert_same
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcckpt import CheckpointError, MutationError, checkpoint, policies, remat
from funcckpt.closures import Found, find, sharing
from funcckpt.nn import apply_remat
from funcckpt.policies import policies as policies_module

F64 = torch.float64


@pytest.fixture(autouse=True, params=["versions", pytest.param("content", marks=pytest.mark.exhaustive)])
def told_by(request, monkeypatch):
    """How changes are told. Without torch's versions of dicts, their content is compared."""
    if request.param == "content":
        monkeypatch.setattr(find, "dict_version", None)


class Part(nn.Module):
    slope = 1.25

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4, dtype=F64), nn.LayerNorm(4, dtype=F64)
        self.options = {"more": {"z": 2.0}, "layer": nn.Linear(4, 4, dtype=F64)}
        self.seq = nn.Sequential(nn.Linear(4, 4, dtype=F64), nn.Sigmoid())
        self.register_buffer("b", torch.full((4,), 0.7, dtype=F64))
        self.f = lambda x: x.cos()
        self.ps = nn.ParameterList([torch.ones(4, dtype=F64)])

    def forward(self, x):
        x = self.options["layer"](self.norm(self.linear(x)) * self.options["more"]["z"])
        return (x.tanh() + self.f(self.seq(x) * self.b)) * self.slope * self.ps[0]


CHANGES = {
    "attribute of a module's class": lambda m: setattr(Part, "slope", 0.5),
    "item of a dict in a dict": lambda m: m.options["more"].__setitem__("z", -1.0),
    "module in a dict": lambda m: m.options.__setitem__("layer", copy.deepcopy(m.seq[0])),
    "module of a sequence": lambda m: m.seq.__setitem__(1, nn.Tanh()),
    "buffer, in place": lambda m: m.b.mul_(2),
    "buffer registered anew": lambda m: (delattr(m, "b"), m.register_buffer("b", torch.zeros(4, dtype=F64))),
    "function": lambda m: setattr(m, "f", lambda x: x.exp()),
    "no parameter": lambda m: setattr(m.linear, "bias", None),
    "parameter of a list": lambda m: m.ps.__setitem__(0, nn.Parameter(torch.zeros(4, dtype=F64))),
    "setting of a library's module": lambda m: setattr(m.norm, "eps", 0.5),
}
# Where a copy cannot stand for it.
REFUSED = {"buffer, in place", "attribute of a module's class"}
WRAPS = {
    "remat": remat,
    "apply_remat": lambda m: apply_remat(m, Part),
    "checkpoint": lambda m: functools.partial(checkpoint, m, use_reentrant=False),
}


def run(wrap=lambda m: m, change=lambda m: None):
    """The value of a loss and its gradients, with something changed before the backward."""
    torch.manual_seed(0)
    m = nn.Sequential(Part(), Part())
    parameters = list(m.parameters())
    value = wrap(m)(torch.linspace(-1, 1, 8, dtype=F64).reshape(2, 4)).sin().sum()
    change(m)
    return [value.detach(), *torch.autograd.grad(value, parameters)]


@pytest.mark.parametrize("how", WRAPS)
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_before_the_backward(change, part, how, monkeypatch):
    monkeypatch.setattr(Part, "slope", Part.slope)  # is put back
    expected = run()
    try:
        found = run(WRAPS[how], lambda m: CHANGES[change](m[part]))
    except (CheckpointError, MutationError) as error:
        assert change in REFUSED and (how != "checkpoint" or "in place" in change), error
    else:
        assert_same(found, expected)


class Stack(nn.Module):
    """Blocks that are called by one method: the calls of a forward refer to the same model."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Part() for _ in range(3)])
        self.power, self.calls = 1.0, 0
        self.functions = [lambda x, i=i: self.block(i, x) for i in range(3)]
        self.same = [self.other(i) for i in range(3)]

    def block(self, i, x):
        return self.blocks[i](x) * self.power

    def other(self, i):
        return lambda x: self.block(i, x) + (self.same[0](x) if i else 0)

    def counted(self, i, x):
        self.calls += 1
        return self.block(i, x) / self.calls

    def forward(self, x, way, wrap, change):
        for i in range(3):
            x = WAYS[way](self, i, wrap)(x)
            change(self, i)
        return x


WAYS = {
    "partial of a method": lambda m, i, wrap: wrap(functools.partial(m.block, i)),
    "partial with a keyword": lambda m, i, wrap: wrap(functools.partial(lambda x, i: m.block(i, x), i=i)),
    "method": lambda m, i, wrap: functools.partial(wrap(m.block), i),
    "what it assigns itself": lambda m, i, wrap: functools.partial(wrap(m.counted), i),
    "lambda": lambda m, i, wrap: wrap(lambda x: m.block(i, x)),
    "lambda with a default": lambda m, i, wrap: wrap(lambda x, i=i: m.block(i, x)),
    "functions of the model": lambda m, i, wrap: wrap(m.functions[i]),
    "functions that call each other": lambda m, i, wrap: wrap(m.same[i]),
}
BETWEEN = {
    "nothing": lambda m, i: None,
    "number": lambda m, i: setattr(m, "power", m.power + 0.5),
    "module": lambda m, i: m.blocks[0].seq.__setitem__(1, nn.Tanh()),
    "item": lambda m, i: m.blocks[i].options["more"].__setitem__("z", float(i)),
    "to what was empty": lambda m, i: m.blocks[0].register_forward_hook(lambda m, args, out: out * 2),
    "by another function": lambda m, i: m.functions.__setitem__(i, lambda x: x.exp()),
}


def run_stack(way, change, wrap=lambda f: f, after=lambda m: None):
    torch.manual_seed(0)
    m = Stack()
    value = m(torch.linspace(-1, 1, 8, dtype=F64).reshape(2, 4), way, wrap, change).sin().sum()
    after(m)
    return [value.detach(), *torch.autograd.grad(value, [*m.parameters()])]


@pytest.mark.parametrize("how", ["remat", "checkpoint"])
@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize("way", WAYS)
def test_changed_between_calls_that_share_a_search(way, change, how):
    for after in (lambda m: None, lambda m: setattr(m, "power", 7.0)):
        expected = run_stack(way, BETWEEN[change], after=after)
        assert_same(run_stack(way, BETWEEN[change], WRAPS[how], after), expected)


@pytest.mark.parametrize("way", ["partial of a method", "method", "lambda", "lambda with a default"])
def test_calls_of_a_forward_share_a_search(way, monkeypatch):
    searches = []
    init = Found.__init__
    monkeypatch.setattr(Found, "__init__", lambda self, root: (searches.append(root), init(self, root))[1])
    run_stack(way, BETWEEN["nothing"], remat)
    assert len(searches) == 1
    run_stack(way, BETWEEN["number"], remat)
    assert len(searches) == 4


class Options:
    def __init__(self, **options):
        self.__dict__.update(options)


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x):
        return x.sin()


class ScaledAnew(Scaled):
    def forward(self, x):
        return (x * self.scale).sin()


FACTOR_A, FACTOR_B = 2.0, 3.0
by_a, by_b = lambda x: (x * FACTOR_A).sin(), lambda x: (x * FACTOR_B).sin()
apply_to = lambda f, x: f(x)


def other_code(wrap, x):
    globals()["FACTOR_B"] = 3.0
    for f in (by_a, by_b):
        x = wrap(functools.partial(apply_to, f))(x)
    yield x
    globals()["FACTOR_B"] = 7.0


def renamed_attribute(wrap, x):
    s = Options(k=1.0, a=2.0)
    yield wrap(lambda x: (x * getattr(s, "a", 1.0) * getattr(s, "b", 3.0)).sin())(x)
    s.b = s.__dict__.pop("a")


def exchanged_namespace(wrap, x):
    s = Options(a=2.0)
    yield wrap(lambda x: (x * s.a).sin())(x)
    s.__dict__ = {"a": 5.0}


def exchanged_namespace_of_a_function(wrap, x):
    g = lambda x: x * g.scale
    g.scale = 2.0
    yield wrap(lambda x: g(x).sin())(x)
    g.__dict__ = {"scale": 5.0}


def item_that_moves(wrap, x):
    first, second = {"w": 2.0}, {}
    yield wrap(lambda x: (x * first.get("w", 1.0) * second.get("w", 1.0) ** 2).sin())(x)
    second["w"] = first.pop("w")


def other_class(wrap, x):
    m = Scaled()
    m.scale = 2.0
    f = lambda x: m(x)
    waiting = [wrap(f)(x)]
    m.__class__ = ScaledAnew
    yield wrap(f)(x)
    m.scale = 5.0
    waiting.clear()


def keywords_by_name(wrap, x):
    f = lambda x, keywords: (x * keywords.s).sin()
    for i in range(3):
        options = Options(s=1.0 + i)
        x = wrap(functools.partial(f, keywords=options))(x)
    yield x
    options.s = 9.0


def a_chain(wrap, x):
    chain = None
    for i in range(1100):
        chain = 0.5, chain
        if i % 100 == 99:
            x = wrap(lambda x: (x * chain[0] + 1).sin())(x)  # noqa: B023
    yield x


def a_method_of_a_dataclass(wrap, x):
    @dataclasses.dataclass
    class Times:
        scale: float

        def __call__(self, other, x):
            return (x * self.scale).sin()

    yield wrap(types.MethodType(Times(2.0), Options()))(x)


def imported_by_f(wrap, x):
    sys.modules.pop("imported_later", None)
    m = ScaledAnew()

    def f(x):
        import imported_later

        return m(x * imported_later.scale)

    waiting = [wrap(f)(x)]
    yield wrap(f)(x)
    sys.modules["imported_later"].scale = 5.0
    waiting.clear()


def other_module_of_this_name(wrap, x):
    def f(x):
        import imported_anew

        return x * imported_anew.scale

    m, waiting = Scaled(), []
    for scale in (2.0, 3.0):
        sys.modules["imported_anew"] = module = types.ModuleType("imported_anew")
        module.scale = scale
        waiting.append(wrap(lambda x: m(f(x)))(x))
    yield waiting.pop()
    module.scale = 9.0


def functions_with_names(wrap, x):
    s = Options(va=2.0, vb=3.0, m=Scaled())

    def named(name):
        def g(x):
            return s.m(x) * operator.attrgetter(g.__name__)(s)

        g.__name__ = name
        return g

    ys = [wrap(named(name))(x) for name in ("va", "vb")]
    yield ys[0] + ys[1]
    s.va, s.vb = 7.0, 9.0


def history_that_one_call_lets_go(wrap, x):
    state = {"h": torch.ones(4, dtype=F64), "k": 2.0}
    f = lambda i, x: (x * state["k"]).sin() * (state["h"] if i else 1)
    y = wrap(functools.partial(f, 0))(x)
    state["h"].mul_(x.detach().requires_grad_())
    waiting = [wrap(functools.partial(f, 1))(x)]
    yield y
    state["k"] = 5.0
    waiting.clear()


def empty_at_the_call(wrap, x):
    cache, o, m = {}, Options(), Scaled()
    ys = wrap(lambda x: m(x * cache.get("k", 2.0)).sin())(x)
    ys = ys + wrap(lambda x: m(x * getattr(o, "k", 2.0)).sin())(x)
    yield ys
    cache.update({"k": 5.0})
    vars(o).update(k=5.0)


def one_in_place_of_two(wrap, x):
    m = nn.Sequential(Scaled(), Scaled())
    f = lambda p, q, x: (m(x) * p[0][0] * q[0][0]).sin()
    inner = [2.0]
    outer = [inner]
    waiting = [wrap(functools.partial(f, [[2.0]], [[3.0]]))(x)]
    waiting.append(wrap(functools.partial(f, outer, [inner]))(x))
    yield wrap(functools.partial(f, outer, [[2.5]]))(x)
    inner[0] = 7.0
    waiting.clear()


def one_in_place_of_two_twice(wrap, x):
    m, o = nn.Sequential(Scaled(), Scaled()), Options(k=2.0)
    f = lambda p, q, x: (m(x) * p[0].k * q[0].k).sin()
    waiting = [wrap(functools.partial(f, [o], [o]))(x)]
    for _ in range(2):
        both = [o]
        waiting.append(wrap(functools.partial(f, both, both))(x))
    yield waiting[-1]
    o.k = 5.0


def empty_of_what_an_earlier_call_has_made(wrap, x):
    m = nn.Sequential(Scaled(), Scaled())
    f = lambda g, x: (m(x) * getattr(g, "scale", 1.0)).sin()
    make = lambda: lambda: 0
    waiting, g = [wrap(functools.partial(f, make()))(x)], make()
    waiting += [wrap(functools.partial(f, g))(x), wrap(functools.partial(f, g))(x)]
    yield waiting[-1]
    g.scale = 5.0


def functions_whose_ids_come_back(wrap, x):
    m, chance = nn.Sequential(Scaled(), Scaled()), random.Random(3)
    f = lambda g, h, x: (m(x) * getattr(g, "scale", 1.0) * getattr(h, "scale", 1.0)).sin()
    make = lambda: lambda: 0
    total, waiting = 0, []
    for _ in range(200):
        g, h = make(), make()
        waiting.append((wrap(functools.partial(f, g, h))(x), g, h))
        del g, h
        while len(waiting) > 2:
            y, g, h = waiting.pop(chance.randrange(2))
            (g if chance.random() < 0.5 else h).scale = 3.0
            total = total + torch.autograd.grad(y.sum(), x)[0]
            del y, g, h
    yield x * total


OTHERS = [
    empty_at_the_call,
    one_in_place_of_two,
    one_in_place_of_two_twice,
    empty_of_what_an_earlier_call_has_made,
    functions_whose_ids_come_back,
    history_that_one_call_lets_go,
    other_code,
    renamed_attribute,
    exchanged_namespace,
    exchanged_namespace_of_a_function,
    item_that_moves,
]
OTHERS += [
    other_module_of_this_name,
    functions_with_names,
    other_class,
    keywords_by_name,
    a_chain,
    a_method_of_a_dataclass,
    imported_by_f,
]


@pytest.mark.parametrize("how", ["remat", "checkpoint"])
@pytest.mark.parametrize("program", OTHERS)
def test_changes_that_a_shared_search_must_see(program, how, tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("scale = 2.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "imported_anew", None)  # is taken away afterwards

    def gradient(wrap):
        x = torch.linspace(0.1, 1, 4, dtype=F64).requires_grad_()
        running = program(wrap, x)
        y = next(running)
        for _ in running:
            pass
        return y.detach(), *torch.autograd.grad(y.sum(), x)

    assert_same(gradient(WRAPS[how]), gradient(lambda f: f))


@pytest.mark.parametrize("how", ["remat", "checkpoint"])
def test_buffers_of_calls_that_share_a_search(how):
    net, x = (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()),
        torch.rand(4, 3, requires_grad=True),
    )
    pending = []
    for count in range(1, 4):
        pending.append(WRAPS[how](functools.partial(lambda n, x: net(x), 1))(x))
        torch.autograd.grad(pending[-1].sum(), x, retain_graph=True)
        assert net[1].num_batches_tracked == count


def test_another_base_of_a_class():
    class A:
        def scaled(self, x):
            return x * self.w

    class B(A):
        pass

    class C(B):
        pass

    c, x = C(), torch.ones(3, requires_grad=True)
    c.w = torch.full((3,), 2.0)
    for bases in ((B,), (A,)):
        C.__bases__ = bases
        (g,) = torch.autograd.grad(remat(lambda x: c.scaled(x).sin())(x).sum(), x)
        assert_same(g, 2 * torch.full((3,), 2.0).cos())


def test_shared_searches_do_not_grow():
    m = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    sizes = []
    for _ in range(12):
        x = torch.ones(2, 4)
        for i in range(4):
            x = remat(lambda x: m[i](x))(x)  # noqa: B023
        loss = x.sum()  # waits until the next one is there
        loss.backward(retain_graph=True)
        sizes.append(max([len(found.empty) + len(found.renamed) for found in sharing._held.values()]))
    assert sizes[-1] <= sizes[2], sizes


def test_calls_that_share_a_search_ask_a_policy_once(monkeypatch):
    asked = []
    decides = policies_module.Chooser.decides
    monkeypatch.setattr(policies_module.Chooser, "decides", lambda *args: asked.append(1) or decides(*args))
    n = 3 if find.dict_version else 4  # what was learned for one size serves later tests
    m = nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n))
    counts, y = [], torch.ones(2, n, requires_grad=True)
    for _ in range(4):
        asked.clear()
        y = remat(lambda x: m(x), policy=policies.dots_saveable)(y)
        counts.append(len(asked))
    assert counts[0] and not any(counts[1:]), counts


class Affine:
    __match_args__ = ("scale", "shift")

    def __init__(self, scale, shift):
        self.scale, self.shift = scale, shift


class Params:
    def __init__(self, w):
        self.w = w


pytree.register_pytree_node(Params, lambda p: ([p.w], None), lambda leaves, _: Params(*leaves))


class Sampler(torch.utils.data.RandomSampler):
    pass


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    pass


class Counting:
    def __setattr__(self, name, value):
        self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        self.__dict__[name] = value * self.count


class LooksUp:
    def __init__(self):
        self.hidden = random.Random(1)

    def __getattribute__(self, name):
        found = object.__getattribute__(self, "hid" + "den" if name == "noise" else name)
        return found.random() if name == "noise" else found


class Divides:
    def __init__(self):
        self.generator = random.Random(1)

    def __divmod__(self, other):
        return self.generator.random(), 0


class Scales(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.generator = random.Random(1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return out * self.generator.random() if func is torch.ops.aten.sin.default else out


def by_position():
    p = Affine(3.0, 0.5)

    def f(x):
        match p:
            case Affine(a, b):
                return x * a + b

    return f, lambda: vars(p).update(scale=9.0)


def by_a_pytree():
    p = Params(2.0)
    return lambda x: x * pytree.tree_leaves(p)[0], lambda: vars(p).update(w=5.0)


def by_methods_of_a_library():
    samples = Sampler(range(3), generator=torch.Generator().manual_seed(1))
    return lambda x: x * torch.tensor([*samples]), lambda: None


def by_a_schedule():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.step()
    schedule = Schedule(optimizer, lambda epoch: 1.0 + epoch)
    return lambda x: (schedule.step(), x * schedule.get_last_lr()[0])[1], lambda: None


def by_setting_an_attribute():
    counting = Counting()

    def f(x):
        counting.k = 1.0
        return x * counting.k

    return f, lambda: None


def by_looking_up():
    p = LooksUp()
    return lambda x: x * p.noise, lambda: None


def by_divmod():
    p = Divides()
    return lambda x: x * divmod(p, 2)[0], lambda: None


def by_a_mode():
    mode = Scales()

    def f(x):
        with mode:
            return torch.sin(x)

    return f, lambda: None


def by_a_state():
    def f(x):
        before = random.getstate()
        x = x * random.random()
        random.setstate(before)
        return x

    return f, random.random


def by_an_attribute_state():
    rng = np.random.default_rng(0)

    def f(x):
        before = rng.bit_generator.state
        x = x * rng.random()
        rng.bit_generator.state = before
        return x

    return f, rng.random


def by_a_copy():
    rng = random.Random(0)
    return lambda x: x * copy.deepcopy(rng).random(), rng.random


def by_a_clone():
    stream = torch.Generator().manual_seed(0)
    draw = lambda stream: torch.rand(3, generator=stream, dtype=F64)
    return lambda x: x * draw(stream.clone_state()), lambda: draw(stream)


NAMED_BY_NO_CODE = [by_position, by_a_pytree, by_methods_of_a_library, by_a_schedule, by_setting_an_attribute]
NAMED_BY_NO_CODE += [
    by_looking_up,
    by_divmod,
    by_a_mode,
    by_a_state,
    by_an_attribute_state,
    by_a_copy,
    by_a_clone,
]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    "how", [remat, lambda f: functools.partial(checkpoint, f)], ids=["remat", "checkpoint"]
)
@pytest.mark.parametrize("make", NAMED_BY_NO_CODE)
def test_what_python_or_a_library_reads(make, how):
    """No code of the user names the attributes and streams."""

    def run(wrap):
        random.seed(0)
        f, move = make()
        x = torch.linspace(0.1, 1, 3, dtype=F64).requires_grad_()
        y = wrap(lambda x: f(x).exp())(x)
        move()
        return y.detach(), *torch.autograd.grad(y.sum(), x)

    assert_same(run(how), run(lambda f: f))


SHARED = [[1.0, 2.5], [1.0, 2.5]]


def scaled(pair, x):
    return (x * pair[0]).sin() * SHARED[1][1] * pair[1]


@pytest.mark.parametrize("wrap", [remat, lambda f: functools.partial(checkpoint, f)], ids=["remat", "hooks"])
def test_a_call_whose_argument_f_also_finds_elsewhere_shares_no_search(wrap):
    """The list of the second call is in a global, too, and those of the others are not."""
    w = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    gradients = []
    for way in (wrap, lambda f: f):
        y = w
        for pair in ([1.0, 2.5], SHARED[1], [1.0, 2.5]):
            y = way(functools.partial(scaled, pair))(y)
        SHARED[1][1] = 9.0
        try:
            gradients.append(torch.autograd.grad(y.sum(), w)[0])
        finally:
            SHARED[1][1] = 2.5
    assert_same(*gradients)
