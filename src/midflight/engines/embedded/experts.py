"""Records of the experts to which each running sequence's tokens went, for routing replay in the
trainer (`models.routing`).
"""

from collections.abc import Sequence

import numpy as np
import torch

from midflight.engines.embedded.runner import StepBatch
from midflight.engines.embedded.whole import AnyRunner
from midflight.models.routing import Routers
from midflight.types import UInt8, fill_unknown


class ExpertRecords:
    """One array for each slot, [positions, bytes of a token]. It holds 255 where nothing was
    computed.

    The first choice at a position is final. When keys are computed again under new weights, the
    tokens sampled before keep the experts that they were sampled with. A prompt whose keys are
    copied from another slot has the experts of that slot.
    """

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._of_slot: dict[int, UInt8] = {}

    def begin(self, slot: int, *, room: int) -> None:
        """Gives the slot to a request of at most `room` tokens. The slot's earlier contents are
        lost.
        """
        self._of_slot[slot] = np.full((room, self._routers.num_bytes), 255, dtype=np.uint8)

    def fill(self, slot: int, parts: Sequence[UInt8]) -> None:
        """Writes these parts one after the other, from the beginning of the slot on."""
        start = 0
        for part in parts:
            self._of_slot[slot][start : start + len(part)] = part
            start += len(part)

    def of(self, slot: int) -> UInt8:
        """The record of the slot's sequence, as far as it goes. It stays when the sequence has
        ended, until the slot is taken again.
        """
        return self._of_slot[slot]

    def forward(self, runner: AnyRunner, batch: StepBatch) -> torch.Tensor:
        """Runs the runner's `forward`, and records the experts that the routers chose."""
        with self._routers.recording() as chosen:
            logits = runner.forward(batch)
        found = self._routers.packed(chosen)
        start = 0
        for slot, first, count in zip(
            batch.slots.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True
        ):
            fill_unknown(self._of_slot[slot][first : first + count], found[start : start + count])
            start += count
        return logits

    def taken(self, slot: int, *, length: int) -> bytes:
        """The record of the slot's first `length` positions."""
        return self._of_slot[slot][:length].tobytes()
