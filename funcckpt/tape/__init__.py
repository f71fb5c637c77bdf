"""The tape: what a first run did, and what of it is not done again.

* `operators`: what an operator reads, writes, returns and costs, as a dispatch mode meets it.
* `tape`: a run, call by call, with the calls that have made what is in memory; and the mode that writes it.
* `recording`: the first run of a function with a policy, and what it keeps.
* `recompute`: how a recomputation hands out what was kept, and skips what nobody reads.
* `drawing`: the random numbers of a run whose streams do not move, since it is traced.
"""
