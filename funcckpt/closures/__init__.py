"""What f refers to: it is found once for each call, and f can be rebuilt around other tensors.

Read in this order: `code` (the names in code), `kinds` (kinds of objects), `find` (all that f refers to, and
whether it has changed), `sharing` (one search for several calls), `rebuild` (f around other tensors).
"""

from .code import code_of
from .find import Found, short
from .rebuild import Rebuilt, exchange_stored, put_back, put_marks, stored
from .sharing import search

__all__ = [
    "Found",
    "Rebuilt",
    "code_of",
    "exchange_stored",
    "put_back",
    "put_marks",
    "search",
    "short",
    "stored",
]
