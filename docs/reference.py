"""The API reference, from the docstrings: ``python docs/reference.py`` writes ``docs/reference/index.html``.

Needs the extra `docs`. Their examples are run by ``tests/test_docs.py``.
"""

import inspect
import sys
import warnings
from pathlib import Path

import pdoc

import funcckpt

# The modules that users import from, beside the package itself.
MODULES = ("meter", "nn", "per_sample", "policies")


def exported() -> list[str]:
    """What the package exports, in the order of its imports."""
    return [
        name for name, item in vars(funcckpt).items() if not (name.startswith("_") or inspect.ismodule(item))
    ]


def main(folder: Path) -> None:
    # pdoc shows what is imported only if __all__ names it.
    funcckpt.__all__ = [*exported(), *MODULES]  # type: ignore[attr-defined]
    pdoc.render.configure(
        docformat="numpy", show_source=False, footer_text=f"funcckpt {funcckpt.__version__}"
    )
    with warnings.catch_warnings():
        # It looks up the types of a NamedTuple's fields in another module.
        warnings.filterwarnings("ignore", r"Error parsing type annotation ForwardRef\('(Any|Tensor)'\)")
        # The package is the one that is imported above, be there another one in the folder.
        warnings.filterwarnings("ignore", "'funcckpt' may refer to either the installed")
        pdoc.pdoc("funcckpt", rf"!funcckpt\.(?!({'|'.join(MODULES)})$)", output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("reference"))
