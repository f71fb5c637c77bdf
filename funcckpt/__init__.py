"""Activation checkpointing as a pure function transform for PyTorch and torch.func."""

from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    ClosureError as ClosureError,
)
from .errors import (
    EscapeError as EscapeError,
)
from .errors import (
    FuncckptError as FuncckptError,
)
from .errors import (
    InputError as InputError,
)
from .errors import (
    MutationError as MutationError,
)
from .errors import (
    OutputError as OutputError,
)
from .mixed import inner_grad as inner_grad
from .remat import remat as remat
from .scan import (
    fori_loop as fori_loop,
)
from .scan import (
    scan as scan,
)
from .scan import (
    while_loop as while_loop,
)

__version__ = "0.1.0"
