"""The tape: what a first run did, and what of it is not done again.

* `operators`: what an operator reads, writes and returns, as a dispatch mode meets it.
* `recording`: a run, call by call, with the calls that have made what is in memory; and `Record`, which
  holds of a first run what a policy says to keep.
* `numbering`: numbers by which values of two runs are compared.
* `recompute`: how a recomputation hands out what was kept, and skips what nobody reads.
* `drawing`: the random numbers of a run whose streams do not move, since it is traced.
* `flops`: what an operator costs.
"""
