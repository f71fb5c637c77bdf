"""Modules that are recomputed (`modules`), and the choice of them for a given number of bytes (`plan`)."""

import typing as _typing

from .modules import Remat, Sequential, apply_remat, remove_remat

if _typing.TYPE_CHECKING:
    from .plan import fit

__all__ = ["Remat", "Sequential", "apply_remat", "fit", "remove_remat"]


def __getattr__(name: str) -> _typing.Any:
    if name == "fit":  # imported only when asked for
        from .plan import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
