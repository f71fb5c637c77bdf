"""What does the gradient through a power iteration of 10,000 steps take, with a checkpoint every 20 steps?

    python tests/benchmarks/power_iteration.py

The iteration of https://github.com/pytorch/pytorch/issues/125591: D <- C D / |C D| with C = A + l B, all 200 x 200
in float64, and the derivative with respect to l of the norm of B^T D in the end. Compared are
`torch.utils.checkpoint` in plain eager code, as in the issue; `remat` around 20 steps under torch.func.grad; `scan`
with √n segments and with its default; and `jax.checkpoint` around 20 steps in a compiled `jax.lax.scan`, where JAX
is installed. Bytes and FLOPs of torch are those of meta tensors; what has no checkpoint is not run, as it takes
gigabytes.
"""

import torch
from common import Methods, is_installed, main, none, of_jax, of_torch, torch_checkpoint
from torch.func import grad

from funcckpt import remat, scan

EVERY = 20


def step(c, d):
    d = c @ d
    return d / torch.linalg.matrix_norm(d)


def some_steps(c, d):
    for _ in range(EVERY):
        d = step(c, d)
    return d


def objective(iterate):
    def run(x, a, b, d, steps):
        return torch.linalg.matrix_norm(b.mT @ iterate(a + x * b, d, steps))

    return run


def in_a_loop(wrap):
    def iterate(c, d, steps):
        for _ in range(steps // EVERY):
            d = wrap(some_steps)(c, d)
        return d

    return objective(iterate)


def scanned(**options):
    return objective(lambda c, d, steps: scan(lambda d, _: (step(c, d), None), d, length=steps, **options)[0])


def in_plain_eager(f):
    def run(x, *args):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x, *args), x)[0]

    return run


def by_jax(steps, *args):
    import jax
    import jax.numpy as jnp

    def step(c, d):
        d = c @ d
        return d / jnp.linalg.norm(d)

    @jax.checkpoint
    def some_steps(d, c):
        return jax.lax.fori_loop(0, EVERY, lambda _, d: step(c, d), d)

    def objective(x, a, b, d):
        c = a + x * b
        d, _ = jax.lax.scan(lambda d, _: (some_steps(d, c), None), d, None, steps // EVERY)
        return jnp.linalg.norm(b.T @ d)

    jax.config.update("jax_enable_x64", True)
    return of_jax(jax.grad(objective), *[jnp.asarray(x.numpy()) for x in args])


def iteration(toy: bool) -> Methods:
    side, steps = (10, 100) if toy else (200, 10_000)
    generator = torch.Generator().manual_seed(0)
    a, b, d = [torch.randn(side, side, generator=generator, dtype=torch.float64) for _ in range(3)]
    given = (torch.zeros((), dtype=torch.float64), a / a.norm(), b / b.norm(), d)

    def job(f, is_run=True):
        return lambda: of_torch(f, *given, steps, on_meta=True, is_run=is_run)

    found: Methods = {
        "plain eager, torch.utils.checkpoint": job(in_plain_eager(in_a_loop(torch_checkpoint))),
        "plain eager": job(in_plain_eager(in_a_loop(none)), toy),
        "torch.func.grad": job(grad(in_a_loop(none)), toy),
        "torch.func.grad, remat": job(grad(in_a_loop(remat))),
        'torch.func.grad, scan(checkpoint="sqrt")': job(grad(scanned(checkpoint="sqrt"))),
        "torch.func.grad, scan": job(grad(scanned())),
    }
    if is_installed("jax"):
        found["JAX, jax.checkpoint"] = lambda: by_jax(steps, *given)
    return found


PROBLEMS = {"10,000 steps": iteration}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=1)
