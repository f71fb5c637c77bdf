"""What do Jacobians and Hessian-vector products through a sampler take, against its number of steps?

    python tests/benchmarks/langevin.py

Langevin steps down a learned energy draw noise in each step. Measured are `jacrev`; `jacfwd` for two parameters,
which keeps nothing; and a product with the Hessian, forward over reverse; of the plain loop, and of `scan` with √n
segments and with its default. All is in float64.
"""

import torch
from common import Methods, main, of_torch
from torch.func import grad, jacfwd, jacrev, jvp

from funcckpt import scan

STEPS, WIDTH = [100, 400], 32
F64 = torch.float64
LOOPS = {"plain loop": None, "scan, √n": {"checkpoint": "sqrt"}, "scan": {}}


def sampled(options: dict | None, x: torch.Tensor, w: torch.Tensor, rates: torch.Tensor, steps: int):
    def step(x, _):
        energy = lambda x: torch.log(torch.cosh(w @ x)).sum() + (x**2).sum() / 2
        return x - rates[0] * grad(energy)(x) + rates[1] * torch.randn_like(x), None

    torch.manual_seed(1)
    if options is None:
        for _ in range(steps):
            x, _ = step(x, None)
        return x
    return scan(step, x, length=steps, **options)[0]


DERIVATIVES = {
    "jacrev": lambda o, x, w, r, n: jacrev(lambda x: sampled(o, x, w, r, n))(x),
    "jacfwd": lambda o, x, w, r, n: jacfwd(lambda r: sampled(o, x, w, r, n), randomness="same")(r),
    "hvp": lambda o, x, w, r, n: jvp(grad(lambda x: sampled(o, x, w, r, n).sum()), (x,), (x,))[1],
}


def langevin(derivative: str, steps: int):
    def problem(toy: bool) -> Methods:
        width = WIDTH // 4 if toy else WIDTH
        w = torch.randn(width, width, generator=torch.Generator().manual_seed(0), dtype=F64) / width**0.5
        given = torch.ones(width, dtype=F64), w, torch.tensor([0.05, 0.1], dtype=F64)
        return {
            name: lambda options=options: of_torch(
                DERIVATIVES[derivative], options, *given, steps // 10 if toy else steps
            )
            for name, options in LOOPS.items()
        }

    return problem


PROBLEMS = {f"{name}, {n} steps": langevin(name, n) for n in STEPS for name in DERIVATIVES}

if __name__ == "__main__":
    main(__file__, PROBLEMS, rounds=1)
