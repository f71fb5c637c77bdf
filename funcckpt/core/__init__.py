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
the innermost, applies its line, leaves the level and starts again, until none is left. There the program
runs: all transforms have been moved into it. `primitive` is the same as a `torch.autograd.Function`, and
the definition against which `dispatch` is tested.

**The last backward of a level.** `torch.func.grad` always records its own backward. At the level where it
was called nobody can read that recording, and what it would save is dead weight. There the pullback runs
below the level; for all outer levels, and for plain autograd, it is R again.

**The net.** A tensor that f uses and was not given would be a constant in the program: a wrong gradient
with no error. `closures` finds what f refers to. `net` sees what was not found: in the first run the levels
of the caller are put back as shadows over inputs that belong to none of them, and an output that belongs to
a shadow is an error. In plain autograd the graph of the first run says which captured tensors f has used:
those are inputs, and no others.

**Where tensors live.** In `save_for_backward`, and nowhere else: a program refers to its inputs by number,
and `call` to captured tensors by id. The graph frees them as the backward goes.

**The call.** `call.Call` is the program at the root: what f is given (`flat`), what it refers to
(`closures`), and the world in which it ran (`world`). It runs f twice, the second time as it was at the
call. All of these ask `tensors`, for levels, versions, buffers and the graph.
"""
