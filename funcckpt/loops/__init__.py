"""Reverse mode through long loops, in bounded memory.

The backward of a loop of n steps needs the carry of each step, last step first. To keep all carries takes
memory for n of them. To keep one, and run the loop again for each step, takes n²/2 steps. Checkpointing lies
between the two: keep a few carries, and run the steps between them again. Read in this order:

============= =====================================================================================
`schedules`   Which carries are kept. Binomial checkpointing with k carries runs each of n ≤ C(k + r, k)
              steps at most r + 1 times, and no schedule runs fewer.
`scan`        `scan`, `fori_loop`, `while_loop`. Each part of a schedule is a `remat` of the loop over its
              steps, so that every transform of a loop is one of `remat`.
`steps`       Runs some steps, and checks that carries and ys have the same shapes and dtypes in each.
`measure`     Measures the memory of a step, to find a schedule for a given number of bytes.
`inner`       `inner_grad`: the gradient of a step of meta-learning, of which only the inputs are kept.
============= =====================================================================================

Limits. Python runs the loops, one step after another. So the body may branch on values if no `vmap` is around
it, and a step takes the time to launch its operators. `torch.func.grad` keeps the graph of the last step
until it returns.
"""

from .inner import inner_grad as inner_grad
from .scan import fori_loop as fori_loop, scan as scan, while_loop as while_loop
