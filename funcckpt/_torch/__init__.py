"""Every private name of torch that funcckpt touches, and why: `functorch`, `wrappers`, `autograd`, `dynamo`.

All are needed to dispatch without building a class for each call, to see what a function captured, and to be
lean in a backward that nobody can differentiate. `tests/test_private_torch.py` fails loudly when a release of
torch moves one of them, and `core.primitive` is there without them.
"""

import torch


def unknown(error: ImportError) -> ImportError:
    """What to raise where a private name is missing."""
    return ImportError(
        f"funcckpt does not know torch {torch.__version__}: {error}. Install a newer funcckpt, or a torch "
        "from 2.11 to 2.15."
    )
