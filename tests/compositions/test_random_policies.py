"""Random programs under random stacks of transforms, with a policy that saves at random.

Whatever is kept, the result is that of the program without remat. A policy that was to hand out a wrong
value would show here: the programs draw random numbers, write in place, branch and nest.
"""

import functools
import os
import random
import zlib

import pytest
from support import seeds

from funcckpt import policies, remat

from .programs import draw
from .test_random_programs import complaint

pytestmark = pytest.mark.usefixtures("small_sizes_matter")
COUNT = int(os.environ.get("FUNCCKPT_RANDOM_POLICIES", "150"))
START = int(os.environ.get("FUNCCKPT_RANDOM_START", "0"))


def at_random(seed):
    """A policy that keeps some of all results, as if by chance."""
    share = random.Random(seed).choice([10, 50, 90])

    def policy(ctx, op, *args, **kwargs):
        # No generator: f refers to its policy where it calls remat, and would not be pure.
        return zlib.crc32(f"{seed} {op} {getattr(ctx.op_output, 'shape', None)}".encode()) % 100 < share

    return policy


class Counting:
    """A policy that keeps every other result: f refers to something that changes."""

    def __init__(self, seed):
        self.calls = seed

    def __call__(self, ctx, op, *args, **kwargs):
        self.calls += 1
        return self.calls % 2 == 0


FIXED = policies.everything_saveable, policies.dots_saveable, policies.budget(fraction=0.5), None
MAKE = [at_random, *[lambda seed, policy=policy: policy for policy in FIXED], Counting]


# The first: copies of buffers before f begins.
@pytest.mark.parametrize("seed", [30141, *seeds(120, COUNT, START)])
def test_same_as_without_remat(seed):
    # 30141 has drawn the second of five.
    policy = MAKE[1 if seed == 30141 else seed % 6](seed)
    for _ in range(3):  # the second keeps and skips what was learned in the first; the third is not watched
        wrong, _ = complaint(draw(seed), functools.partial(remat, policy=policy))
        assert wrong is None, f"{wrong}\n{draw(seed)}"
