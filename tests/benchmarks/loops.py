"""What do derivatives through long loops take, by each of the ways to get them?

    python tests/benchmarks/loops.py [loops|functorch_grad|power_iteration|sampler|langevin|bilevel|maml]

loops            Bytes against the number of steps of h + tanh(h w) in each schedule (h takes 1 KiB), and the times of one
                 number. FLOPs tell how often a step is run: three products a step, and one for each more. JAX and
                 Equinox are peers. The summary has exponents, `results/loops.png` the bytes (extra `plot`).
functorch_grad   ten times cos(sin(x)) of 4 MiB, https://github.com/pytorch/pytorch/issues/134612
power_iteration  10,000 times D <- C D / |C D|, https://github.com/pytorch/pytorch/issues/125591, with checkpoints every
                 20. Bytes and FLOPs are those of meta tensors; what has no checkpoint is not run: it takes gigabytes.
sampler          The Jacobian of a flow by Euler's method, https://github.com/pytorch/pytorch/issues/141845
langevin         Jacobians and a product with the Hessian through steps down a learned energy that draw noise
bilevel          Eight steps on a small language model, with respect to a rate for each block (arXiv 2505.00793)
maml             Meta-gradients of sinusoids (Finn et al., 2017) and of digits against the number of inner steps, with
                 respect to the initial weights and the rate. `results/maml.png` (extras `meta` and `plot`)
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from common import Benchmark, Job, Methods, exponents, main, none, of_jax, of_torch, torch_checkpoint
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.nn.functional import cross_entropy, silu
from torch.utils import _pytree as pytree
from torch_models import Shape, init, loss_with

from funcckpt import inner_grad, remat, scan, while_loop

F64 = torch.float64


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def unrolled(step: Callable, carry: Any, steps: int) -> Any:
    for _ in range(steps):
        carry, _ = step(carry, None)
    return carry


def scanned(**options: Any) -> Callable:
    return lambda step, carry, steps: scan(step, carry, length=steps, **options)[0]


STEPS = [16, 128, 1024, 8192, 100_000]
TIMED = 1024


def cell(h: Tensor, w: Tensor) -> Tensor:
    return h + torch.tanh(h @ w)


def of_known_length(w: Tensor, h: Tensor, steps: int, carries: int = 0, **options: Any) -> Tensor:
    options |= {"bytes": carries * h.nbytes} if carries else {}
    return scanned(**options)(lambda h, _: (cell(h, w), None), h, steps).square().mean()


def of_unknown_length(w: Tensor, h: Tensor, steps: int, **options: Any) -> Tensor:
    _, h = while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, cell(c[1], w)), (0, h), **options)
    return h.square().mean()


def in_jax(wrap: str, w: Any, h: Any, steps: int) -> Any:
    import jax

    body = lambda h, _: (h + jax.numpy.tanh(h @ w), None)
    if wrap == "equinox":
        import equinox.internal

        h, _ = equinox.internal.scan(body, h, None, steps, kind="checkpointed")
    else:
        h, _ = jax.lax.scan(jax.checkpoint(body) if wrap == "checkpoint" else body, h, None, steps)
    return (h**2).mean()


OURS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "plain loop": (of_known_length, {"checkpoint": None}),
    'scan, "every"': (of_known_length, {"checkpoint": "every"}),
    'scan, "sqrt"': (of_known_length, {"checkpoint": "sqrt"}),
    "scan": (of_known_length, {}),
    'scan, "recursive"': (of_known_length, {"checkpoint": "recursive"}),
    "scan, checkpoints=10": (of_known_length, {"checkpoints": 10}),
    "scan, bytes of 100 carries": (of_known_length, {"carries": 100}),
    "while_loop": (of_unknown_length, {}),
    "while_loop, checkpoints=10": (of_unknown_length, {"checkpoints": 10}),
}
PEERS = {"jax.lax.scan": "plain", "jax.lax.scan, jax.checkpoint": "checkpoint"}
# What the picture shows, and how.
DRAWN = {
    "plain loop": ("#bc4c00", "o-"),
    "jax.lax.scan, jax.checkpoint": ("#9a6700", "x:"),
    'scan, "recursive"': ("#656d76", "D-"),
    "scan": ("#1a7f37", "v-"),
    "scan, checkpoints=10": ("#0969da", "o-"),
}


def loop(steps: int, is_timed: bool, toy: bool) -> Methods:
    n = min(steps, 16) if toy else steps
    width, batch = (256, 64) if is_timed and not toy else (32, 8)
    g = seeded(0)
    w, h = torch.randn(width, width, generator=g) / width**0.5 / 10, torch.randn(batch, width, generator=g)

    def ours(last: Callable, options: dict[str, Any]) -> Job:
        return of_torch(grad(lambda w, h: last(w, h, n, **options)), w, h, is_run=is_timed)

    def peer(wrap: str) -> Job:
        import jax

        job = of_jax(jax.grad(lambda w, h: in_jax(wrap, w, h, n)), w, h)
        return job if is_timed else Job(None, job.cost)

    found: Methods = {name: partial(ours, *how) for name, how in OURS.items()}
    if common.is_installed("jax"):
        peers = PEERS | ({"Equinox, checkpointed": "equinox"} if common.is_installed("equinox") else {})
        found |= {name: partial(peer, wrap) for name, wrap in peers.items()}
    return found


def is_untimed(row: dict[str, Any]) -> bool:
    return "time" not in row["problem"]


def sum_of_steps(wrap: Callable) -> Callable:
    step = lambda x, _: (wrap(lambda x: x.sin().cos())(x), None)
    return lambda x: unrolled(step, x, 10).sum()


def ten_steps(toy: bool) -> Methods:
    side = 64 if toy else 1024
    ways = {"": none, ", torch.utils.checkpoint": torch_checkpoint, ", remat": remat}
    gradients = {"torch.autograd.grad": common.in_plain_eager, "torch.func.grad": grad}
    return {
        name + way: partial(of_torch, f(sum_of_steps(wrap)), torch.rand(side, side, generator=seeded(0)))
        for way, wrap in ways.items()
        for name, f in gradients.items()
        if (f, wrap) != (common.in_plain_eager, remat)
    }


EVERY = 20


def power_step(c: Any, d: Any, norm: Callable = torch.linalg.matrix_norm) -> Any:
    d = c @ d
    return d / norm(d)


def some_steps(c: Tensor, d: Tensor) -> Tensor:
    return unrolled(lambda d, _: (power_step(c, d), None), d, EVERY)


def objective(iterate: Callable) -> Callable:
    return lambda x, a, b, d, steps: torch.linalg.matrix_norm(b.mT @ iterate(a + x * b, d, steps))


def in_twenties(wrap: Callable) -> Callable:
    return objective(lambda c, d, n: unrolled(lambda d, _: (wrap(some_steps)(c, d), None), d, n // EVERY))


def power_scanned(**options: Any) -> Callable:
    return objective(lambda c, d, n: scanned(**options)(lambda d, _: (power_step(c, d), None), d, n))


def power_by_jax(steps: int, *args: Tensor) -> Job:
    import jax

    norm = jax.numpy.linalg.norm
    some = jax.checkpoint(lambda d, c: jax.lax.fori_loop(0, EVERY, lambda _, d: power_step(c, d, norm), d))

    def objective(x, a, b, d):
        c = a + x * b
        d, _ = jax.lax.scan(lambda d, _: (some(d, c), None), d, None, steps // EVERY)
        return norm(b.T @ d)

    jax.config.update("jax_enable_x64", True)
    return of_jax(jax.grad(objective), *args)


def power_iteration(toy: bool) -> Methods:
    side, steps = (10, 100) if toy else (200, 10_000)
    g = seeded(0)
    a, b, d = [torch.randn(side, side, generator=g, dtype=F64) for _ in range(3)]
    given = (torch.zeros((), dtype=F64), a / a.norm(), b / b.norm(), d)
    ways = {
        "plain eager, torch.utils.checkpoint": (common.in_plain_eager(in_twenties(torch_checkpoint)), True),
        "plain eager": (common.in_plain_eager(in_twenties(none)), toy),
        "torch.func.grad": (grad(in_twenties(none)), toy),
        "torch.func.grad, remat": (grad(in_twenties(remat)), True),
        'torch.func.grad, scan(checkpoint="sqrt")': (grad(power_scanned(checkpoint="sqrt")), True),
        "torch.func.grad, scan": (grad(power_scanned()), True),
    }
    found: Methods = {
        name: partial(of_torch, f, *given, steps, on_meta=True, is_run=is_run)
        for name, (f, is_run) in ways.items()
    }
    if common.is_installed("jax"):
        found["JAX, jax.checkpoint"] = partial(power_by_jax, steps, *given)
    return found


SAMPLER_STEPS = [8, 32, 128, 512]
SIZE, HIDDEN = 32, 512


def sampler(steps: int, toy: bool) -> Methods:
    g, sizes = seeded(0), [SIZE + 1, HIDDEN, HIDDEN, SIZE]
    weights = [torch.randn(a, b, generator=g) / a**0.5 for a, b in itertools.pairwise(sizes)]
    x = torch.randn(SIZE, generator=seeded(1))
    n = steps // 8 if toy else steps

    def step(x, t, weights=weights, tanh=torch.tanh):
        w1, w2, w3 = weights
        return x + tanh(tanh(x @ w1[:-1] + t * w1[-1]) @ w2) @ w3 / n

    def in_a_loop(wrap):
        def sample(x):
            for i in range(n):
                x = wrap(step)(x, i / n)
            return x

        return partial(of_torch, jacrev(sample), x)

    def by_scan(**options):
        times = lambda x: torch.arange(n, device=x.device) / n
        sample = lambda x: scan(lambda x, t: (step(x, t), None), x, times(x), **options)[0]
        return partial(of_torch, jacrev(sample), x)

    def by_jax(is_wrapped):
        import jax

        def sample(x, weights):
            f = lambda weights, x, t: step(x, t, weights, jax.numpy.tanh)
            f, times = jax.checkpoint(f) if is_wrapped else f, jax.numpy.arange(n, dtype=x.dtype) / n
            return jax.lax.scan(lambda x, t: (f(weights, x, t), None), x, times)[0]

        return of_jax(jax.jacrev(sample), x, weights)

    found: Methods = {
        "jacrev": in_a_loop(none),
        "jacrev, torch.utils.checkpoint": in_a_loop(torch_checkpoint),
        "jacrev, remat": in_a_loop(remat),
        'jacrev, scan(checkpoint="sqrt")': by_scan(checkpoint="sqrt"),
        "jacrev, scan": by_scan(),
    }
    if common.is_installed("jax"):
        found |= {"JAX": partial(by_jax, False), "JAX, jax.checkpoint": partial(by_jax, True)}
    return found


DERIVATIVES = {
    "jacrev": lambda sampled, x, r: jacrev(lambda x: sampled(x, r))(x),
    "jacfwd": lambda sampled, x, r: jacfwd(lambda r: sampled(x, r), randomness="same")(r),
    "hvp": lambda sampled, x, r: jvp(grad(lambda x: sampled(x, r).sum()), (x,), (x,))[1],
}
LOOPS = {"plain loop": unrolled, "scan, √n": scanned(checkpoint="sqrt"), "scan": scanned()}


def langevin(derivative: str, steps: int, toy: bool) -> Methods:
    width, n = (8, steps // 10) if toy else (32, steps)
    w = torch.randn(width, width, generator=seeded(0), dtype=F64) / width**0.5

    def sampled(loop, x, rates):
        def step(x, _):
            energy = lambda x: torch.log(torch.cosh(w @ x)).sum() + (x**2).sum() / 2
            return x - rates[0] * grad(energy)(x) + rates[1] * torch.randn_like(x), None

        torch.manual_seed(1)
        return loop(step, x, n)

    given = torch.ones(width, dtype=F64), torch.tensor([0.05, 0.1], dtype=F64)
    of = partial(partial, of_torch, DERIVATIVES[derivative])
    return {name: of(partial(sampled, loop), *given) for name, loop in LOOPS.items()}


def after_training(gradient: Callable, wrap: Callable, scans: bool) -> Callable:
    of_sequence = loss_with(wrap)

    def loss(parameters, tokens):
        return vmap(of_sequence, (None, 0, 0))(parameters, tokens[:, :-1], tokens[:, 1:]).mean()

    def end(rates, parameters, tokens):
        def step(parameters, batch):
            g = gradient(loss)(parameters, batch)
            blocks = [
                pytree.tree_map(lambda w, g, rate=rate: w - rate * g, *pair)
                for rate, *pair in zip(rates, parameters["blocks"], g["blocks"])
            ]
            return {**parameters, "blocks": blocks}, None

        if scans:
            parameters, _ = scan(step, parameters, tokens[1:], checkpoints=3)
        else:
            for batch in tokens[1:]:
                parameters, _ = step(parameters, batch)
        return loss(parameters, tokens[0])

    return grad(end)


def language_model(toy: bool) -> Methods:
    shape, steps = (Shape(2, 16, 2, 8), 3) if toy else (Shape(6, 64, 4, 64), 8)
    g = seeded(0)
    parameters = init(shape, generator=g, dtype=F64)
    tokens = torch.randint(256, (steps + 1, 4, shape.context + 1), generator=g)
    given = torch.full((shape.layers,), 0.1, dtype=F64), parameters, tokens
    ways = itertools.product(
        {"": grad, "inner_grad": inner_grad}.items(),
        {"": none, "remat(block)": remat}.items(),
        {"": False, "scan": True}.items(),
    )
    return {
        ", ".join([name for name, _ in way if name]) or "torch.func.grad": lambda way=way: of_torch(
            after_training(*[how for _, how in way]), *given
        )
        for way in ways
    }


MAML_STEPS = [5, 50, 500]


def network(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return silu(silu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]) @ p["w3"]


def initial(inputs: int, hidden: int, outputs: int) -> dict[str, Tensor]:
    g = seeded(0)
    shapes = {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, hidden), "b2": (hidden,)}
    return {
        name: torch.randn(shape, generator=g, dtype=F64) / math.sqrt(shape[0])
        for name, shape in {**shapes, "w3": (hidden, outputs)}.items()
    }


# Parameters, samples to adapt to and to be judged by, the loss, and the rate. With a larger one the gradient through
# hundreds of steps is chaotic, and no two ways agree.


def sinusoid() -> tuple:
    x = torch.rand((40, 1), generator=seeded(1), dtype=F64) * 10 - 5
    y = 2.5 * torch.sin(x + 1)
    loss = lambda p, x, y: ((network(p, x) - y) ** 2).mean()
    return initial(1, 40, 1), (x[:20], y[:20], x[20:], y[20:]), loss, 0.002


def digits() -> tuple:
    from sklearn.datasets import load_digits

    images, labels = load_digits(n_class=2, return_X_y=True)
    x, y = torch.tensor(images / 16), torch.tensor(labels)
    loss = lambda p, x, y: cross_entropy(network(p, x), y)
    return initial(64, 32, 2), (x[:100], y[:100], x[100:200], y[100:200]), loss, 0.02


def functional(gradient: Callable, loop: Callable) -> Callable:
    def adapted(meta, task, loss, steps):
        x, y, x_test, y_test = task

        def step(p, _):
            g = gradient(loss)(p, x, y)
            return {name: w - meta["rate"] * g[name] for name, w in p.items()}, None

        return loss(loop(step, meta["p"], steps), x_test, y_test)

    return grad(adapted)


def checkpointed_in_plain_eager(meta, task, loss, steps):
    x, y, x_test, y_test = task
    meta = pytree.tree_map(lambda t: t.clone().requires_grad_(), meta)

    def step(rate, *values):
        with torch.enable_grad():
            inner = loss(dict(zip(meta["p"], values)), x, y)
            gradients = torch.autograd.grad(inner, values, create_graph=True)
        return tuple(w - rate * g for w, g in zip(values, gradients))

    values = tuple(meta["p"].values())
    for _ in range(steps):
        values = torch_checkpoint(step)(meta["rate"], *values)
    loss(dict(zip(meta["p"], values)), x_test, y_test).backward()
    return pytree.tree_map(lambda t: t.grad, meta)


MAML = {
    "torch.func": (functional(grad, unrolled), "#bc4c00", "o-"),
    "plain eager, torch.utils.checkpoint": (checkpointed_in_plain_eager, "#656d76", "x:"),
    "scan, √n": (functional(grad, scanned(checkpoint="sqrt")), "#8250df", "^-"),
    "scan": (functional(grad, scanned()), "#1a7f37", "v-"),
    "inner_grad": (functional(inner_grad, unrolled), "#bc4c00", "o--"),
    "inner_grad, scan": (functional(inner_grad, scanned()), "#1a7f37", "v--"),
}


def maml(problem: Callable[[], tuple], steps: int, toy: bool) -> Methods:
    p, task, loss, rate = problem()
    meta = {"p": p, "rate": torch.tensor(rate, dtype=F64)}
    return {name: partial(of_torch, method, meta, task, loss, steps) for name, (method, *_) in MAML.items()}


def draw_maml() -> None:
    panels = {kind: lambda row, kind=kind: row["problem"].startswith(kind) for kind in ("sinusoid", "digits")}
    styles = {name: style for name, (_, *style) in MAML.items()}
    common.draw_bytes("maml", "inner steps", MAML_STEPS, panels, styles)


BENCHMARKS = {
    "loops": Benchmark(
        {f"time of {TIMED:,} steps": partial(loop, TIMED, True)}
        | {f"{n:,} steps": partial(loop, n, False) for n in STEPS},
        summary=lambda rows: exponents(STEPS[len(STEPS) // 2 :], [row for row in rows if is_untimed(row)]),
        draw=lambda: common.draw_bytes("loops", "steps", STEPS, {"": is_untimed}, DRAWN),
    ),
    "functorch_grad": Benchmark({"cos(sin(x)), 10 times": ten_steps}),
    "power_iteration": Benchmark({"10,000 steps": power_iteration}, rounds=1),
    "sampler": Benchmark(
        {f"{n} steps": partial(sampler, n) for n in SAMPLER_STEPS}, summary=partial(exponents, SAMPLER_STEPS)
    ),
    "langevin": Benchmark(
        {f"{name}, {n} steps": partial(langevin, name, n) for n in (100, 400) for name in DERIVATIVES},
        rounds=1,
    ),
    "bilevel": Benchmark({"language model, 8 inner steps": language_model}, rounds=1),
    "maml": Benchmark(
        {f"{p.__name__}, {n} steps": partial(maml, p, n) for p in (sinusoid, digits) for n in MAML_STEPS},
        rounds=1,
        draw=draw_maml,
    ),
}

if __name__ == "__main__":
    main(__file__, **BENCHMARKS)
