"""What f refers to: it is found once for each call, and f can be rebuilt around other tensors.

Read in this order: `code` (the names in code), `kinds` (kinds of objects), `find` (all that f refers to, and
whether it has changed), `rebuild` (f around other tensors).
"""

from .code import code_of
from .find import Found, search
from .rebuild import Rebuilt, exchange_stored, put_back, stored

__all__ = ["Found", "Rebuilt", "code_of", "exchange_stored", "put_back", "search", "stored"]
