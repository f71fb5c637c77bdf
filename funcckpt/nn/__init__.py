"""Modules that are recomputed (`modules`), and the choice of them for a given number of bytes (`plan`)."""

from .modules import Remat, Sequential, apply_remat, remove_remat
from .plan import fit

__all__ = ["Remat", "Sequential", "apply_remat", "fit", "remove_remat"]
