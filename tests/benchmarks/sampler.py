"""What does the Jacobian of a sampler take, against its number of steps?

    python tests/benchmarks/sampler.py

The use of https://github.com/pytorch/pytorch/issues/141845: a flow x' = v(x, t) is followed by Euler's method in
8 to 512 steps, and torch.func.jacrev taken of where it ends; v is a network of two hidden layers of 512 units and
x has 32 numbers. Compared are the plain loop, `remat` around each step, `scan`, `torch.utils.checkpoint` (which
refuses), and `jax.jacrev` of a compiled `jax.lax.scan` without and with `jax.checkpoint`, where JAX is installed.
The exponents are those of bytes against steps.
"""

import itertools

import torch
from common import Methods, exponent, is_installed, main, none, of_jax, of_torch, torch_checkpoint
from torch.func import jacrev

from funcckpt import remat, scan

STEPS = [8, 32, 128, 512]
SIZE, HIDDEN = 32, 512


def network():
    generator = torch.Generator().manual_seed(0)
    sizes = [SIZE + 1, HIDDEN, HIDDEN, SIZE]
    return [torch.randn(a, b, generator=generator) / a**0.5 for a, b in itertools.pairwise(sizes)]


def velocity(weights, x, t, module=torch):
    """In torch, or in what has the same names."""
    w1, w2, w3 = weights
    h = module.tanh(x @ w1[:-1] + t * w1[-1])
    return module.tanh(h @ w2) @ w3


def in_a_loop(wrap, weights, steps):
    def step(x, t):
        return x + velocity(weights, x, t) / steps

    def sample(x):
        for i in range(steps):
            x = wrap(step)(x, i / steps)
        return x

    return sample


def scanned(weights, steps, **options):
    def sample(x):
        times = torch.arange(steps, device=x.device) / steps
        return scan(lambda x, t: (x + velocity(weights, x, t) / steps, None), x, times, **options)[0]

    return sample


def by_jax(wrapped, weights, x, steps):
    import jax
    import jax.numpy as jnp

    def step(weights, x, t):
        return x + velocity(weights, x, t, jnp) / steps

    def sample(x, weights):
        f = jax.checkpoint(step) if wrapped else step
        return jax.lax.scan(
            lambda x, t: (f(weights, x, t), None), x, jnp.arange(steps, dtype=x.dtype) / steps
        )[0]

    weights = [jnp.asarray(w.numpy()) for w in weights]
    return of_jax(jax.jacrev(sample), jnp.asarray(x.numpy()), weights)


def sampler(steps: int):
    def problem(toy: bool) -> Methods:
        weights = network()
        x = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
        n = steps // 8 if toy else steps
        found: Methods = {
            "jacrev": lambda: of_torch(jacrev(in_a_loop(none, weights, n)), x),
            "jacrev, torch.utils.checkpoint": lambda: of_torch(
                jacrev(in_a_loop(torch_checkpoint, weights, n)), x
            ),
            "jacrev, remat": lambda: of_torch(jacrev(in_a_loop(remat, weights, n)), x),
            'jacrev, scan(checkpoint="sqrt")': lambda: of_torch(
                jacrev(scanned(weights, n, checkpoint="sqrt")), x
            ),
            "jacrev, scan": lambda: of_torch(jacrev(scanned(weights, n)), x),
        }
        if is_installed("jax"):
            found["JAX"] = lambda: by_jax(False, weights, x, n)
            found["JAX, jax.checkpoint"] = lambda: by_jax(True, weights, x, n)
        return found

    return problem


def exponents(rows):
    peaks: dict[str, list[int]] = {}
    for row in rows:
        if "peak_bytes" in row:
            peaks.setdefault(row["method"], []).append(row["peak_bytes"])
    return {method: round(exponent(STEPS, found), 2) for method, found in peaks.items()}


PROBLEMS = {f"{n} steps": sampler(n) for n in STEPS}

if __name__ == "__main__":
    main(__file__, PROBLEMS, summary=exponents)
