"""The tape: the operators of a first run, and which of them need not run again.

* `operators`: what an operator reads, writes, returns and costs, as a dispatch mode sees it.
* `tape`: the calls of operators in a run, and which of them made which storage; the mode that records them,
  or sees a few of them by kernels.
* `recording`: the first run of a function with a policy, and what it keeps.
* `recompute`: a recomputation hands out what was kept, and skips what nobody reads.
* `drawing`: random numbers in a traced run, whose streams do not move.
"""
