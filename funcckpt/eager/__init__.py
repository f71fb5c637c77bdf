"""The path of saved-tensor hooks, for plain eager code: what `torch.utils.checkpoint` offers, and more.

It goes to `funcckpt.remat` wherever hooks cannot be; the functional path never imports it.
"""
