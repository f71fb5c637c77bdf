"""What a function keeps, and what its checkpoints cost: `residuals`, `explain`, `plot`.

Bytes and FLOPs are those of :mod:`funcckpt.meter`, which stands where users import it from: the loops count
with it, too, and need nothing of this folder.
"""
