"""Reverse mode through long loops, in bounded memory.

The backward of a loop of n steps needs the carry that each step was given, last step first. Keeping all
carries takes memory for n; keeping one, and running the loop again for each step, takes n²/2 steps. Between
the two lies checkpointing: keep a few carries, and run the steps between them again. Read in this order:

============= =====================================================================================
`schedules`   Which carries are kept. Binomial checkpointing with k carries runs each of n ≤ C(k + r, k)
              steps at most r + 1 times, and no schedule runs fewer.
`scan`        `scan` and `fori_loop`, for loops whose length is known. Each part of a schedule is a
              `remat` of the loop over its steps, so that every transform of a loop is one of `remat`.
`steps`       Some steps one after another, and that carries and ys look alike from step to step.
`measure`     What a step takes, for a schedule within so many bytes.
`while_loop`  `while_loop`: the steps are counted first.
`mixed`       `inner_grad`: the gradient of a step of meta-learning, whose own pullback needs no inner
              backward, because a Hessian is symmetric (Pearlmutter 1994; Kemaev et al. 2025).
============= =====================================================================================

Limits. Python runs the loops, one step after another: the body may branch on values where no `vmap` is
around it, and a step costs what its operators cost to launch. `torch.func.grad` holds on to the graph of the
last step until it returns.
"""

from .mixed import inner_grad as inner_grad
from .scan import fori_loop as fori_loop, scan as scan
from .while_loop import while_loop as while_loop
