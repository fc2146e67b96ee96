"""The learning rate of each step, as a share of the highest one."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up to 1, then `constant`, or down to 0 at `total_steps` along a line or half a
    cosine.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1

    def factor(self, step: int) -> float:
        """The share for step 0, 1, 2, ... The first step of a warm-up of w steps has 1 / w; the
        last step before the end is above 0.
        """
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
