"""What checkpoints save and cost, measured: in words (`explain`) and as pictures (`plot`).

Both run a function with its checkpoints switched on and off, and count with :mod:`funcckpt.meter`. That one
stands where users import it from; the loops count with it, too, and need nothing of this folder.
"""
