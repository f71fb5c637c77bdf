"""Checkpoints by saved-tensor hooks, for plain eager code. Torch's own settings apply to them."""
