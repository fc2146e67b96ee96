"""The learning rate of a step, as a share of its peak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to 1, then `constant`, or down to 0 at `total_steps` along a line or half a cosine."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1

    def factor(self, step: int) -> float:
        """Of step 0, 1, 2, ...; the first step of a warm-up of w is 1 / w, the last before the end is above 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = self.total_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / left) if left > 0 else 0.0
        match self.kind:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - progress
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * progress))
