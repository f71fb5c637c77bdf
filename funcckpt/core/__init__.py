"""The whole of remat: `program`, `dispatch`, `primitive`, `net`, `call`, `flat`, in this order.

**The idea.** Write R[f] for "run f, keep only its inputs". Four lines are the library:

======== ==================================================================================
primal   R[f](x) = f(x), and x is all that is kept
reverse  the pullback of R[f] at x, applied to ct, is R[(x, ct) -> vjp(f, x)(ct)](x, ct)
forward  the tangent of R[f] at x along t is R[(x, t) -> jvp(f, x, t)](x, t)
batching vmap of R[f] is R[vmap(f)]
======== ==================================================================================

Each right-hand side is R of another function. So remat is closed under every transform: any order of them,
at any depth, is built by the same four lines. `program` has the functions on the right: a *program* is a
pure function of flat tensors, and `Vjp`, `Jvp` and `Vmap` make the next one.

**The levels.** torch.func has a stack of levels, one for each transform that is active. `dispatch` looks at
the innermost, applies its line, leaves the level and starts again, until none is left. Then all transforms
have been moved into the program, and it runs. `primitive` is the same as a `torch.autograd.Function`, the
definition against which `dispatch` is tested.

**The last backward of a level.** `torch.func.grad` always records its own backward. At its own level nobody
can read that recording, and what it would save is dead weight. So the pullback runs below that level. For all
outer levels, and for plain autograd, it is R again.

**The net.** If f uses a tensor that is not an input, this tensor would be a constant in the program: a wrong
gradient, without an error. `closures` finds the tensors to which f refers. `net` detects those that were not
found. In the first run, the levels of the caller are put back as shadows, over inputs that belong to none of
them. An output that belongs to a shadow is an error. In plain autograd, the graph of the first run shows
which captured tensors f has used. Only those become inputs.

**Where tensors live.** Only in `save_for_backward`: a program refers to its inputs by number, and `call` to
captured tensors by id. The graph frees them during the backward.

**The call.** `call.Call` is the program at the root: the arguments of f (`flat`), what f refers to
(`closures`), and the world in which it ran (`world`). It runs f twice, the second time in the state of the
call. `tensors` has what all of these ask about levels, versions and buffers.
"""
