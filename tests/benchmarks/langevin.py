"""Jacobians and Hessian-vector products through a sampler: memory and time against the plain loop.

    python tests/benchmarks/langevin.py [--steps 100 400] [--width 32]

Langevin steps down a learned energy draw noise in each step. Measured are `jacrev` (pytorch#141845: a
Jacobian through a long loop keeps all of its steps), `jacfwd` for two parameters, and a product with the
Hessian, forward over reverse. Bytes are those of `funcckpt.meter`; time is that of one run, as a ratio to
the plain loop. Results are compared with those of the plain loop, in float64.
"""

import argparse
import time

import torch
from torch.func import grad, jacfwd, jacrev, jvp

from funcckpt import scan
from funcckpt.meter import measure

F64 = torch.float64


def sampled(options: dict | None, x: torch.Tensor, w: torch.Tensor, rates: torch.Tensor, steps: int):
    def step(x, _):
        energy = lambda x: torch.log(torch.cosh(w @ x)).sum() + (x**2).sum() / 2
        return x - rates[0] * grad(energy)(x) + rates[1] * torch.randn_like(x), None

    if options is None:
        for _ in range(steps):
            x, _ = step(x, None)
        return x
    return scan(step, x, length=steps, **options)[0]


def derivatives(x, w, rates, steps):
    return {
        "jacrev": lambda o: jacrev(lambda x: sampled(o, x, w, rates, steps))(x),
        "jacfwd": lambda o: jacfwd(lambda r: sampled(o, x, w, r, steps), randomness="same")(rates),
        "hvp": lambda o: jvp(grad(lambda x: sampled(o, x, w, rates, steps).sum()), (x,), (x,))[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--width", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    w = torch.randn(arguments.width, arguments.width, generator=g, dtype=F64) / arguments.width**0.5
    x, rates = torch.ones(arguments.width, dtype=F64), torch.tensor([0.05, 0.1], dtype=F64)
    loops = {"plain": None, "sqrt": {"checkpoint": "sqrt"}, "binomial": {}}
    print(f"{'':>10}{'steps':>8}" + "".join(f"{name + ' KiB':>16}{'time':>8}" for name in loops))
    for steps in arguments.steps:
        for name, derivative in derivatives(x, w, rates, steps).items():
            line, plain = f"{name:>10}{steps:>8}", None
            for options in loops.values():
                start = time.perf_counter()
                torch.manual_seed(1)
                result = derivative(options)
                seconds = time.perf_counter() - start
                plain = plain or (result, seconds)
                peak = measure(derivative, options).peak_bytes
                line += f"{peak / 1024:>16.0f}{seconds / plain[1]:>8.2f}"
                torch.testing.assert_close(result, plain[0])
            print(line, flush=True)


if __name__ == "__main__":
    main()
