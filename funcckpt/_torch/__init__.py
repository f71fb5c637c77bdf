"""All private names of torch that funcckpt uses, and why: `functorch`, `wrappers`, `autograd`, `kernels`,
`dynamo`, `objects`.

They serve to dispatch without building a class for each call, to find what a function has captured, and to
save memory in a backward that nobody can differentiate. `tests/test_private_torch.py` fails if a release of
torch moves one of them. `core.primitive` works without them.
"""
