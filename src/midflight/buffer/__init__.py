"""Station 5: decides which groups may start and which groups a step trains on, so that no token is trained too old."""

from midflight.buffer.buffer import Closed, GroupBuffer, Wait
from midflight.buffer.ledger import Ledger
from midflight.buffer.limits import Limits
from midflight.buffer.queue import GroupQueue

__all__ = ["Closed", "GroupBuffer", "GroupQueue", "Ledger", "Limits", "Wait"]
