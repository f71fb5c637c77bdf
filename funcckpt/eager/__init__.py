"""The path of saved-tensor hooks, for plain eager code, in which torch's own settings apply."""
