"""What f refers to: find it once for each call, and make f anew around other tensors.

Read in this order: `code` (what code names), `find` (places, and whether they hold what they held),
`rebuild` (f around other tensors). `remat`, `checkpoint`, `scan` and `nn.Remat` all ask here.
"""

from .find import Found
from .rebuild import Rebuilt, stored

__all__ = ["Found", "Rebuilt", "stored"]
