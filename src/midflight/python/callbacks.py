"""The functions of a program that receive the events of a run."""

from collections.abc import Callable

import msgspec

from midflight.observe.lines import CheckpointLine, EvaluationLine, Line, StepLine
from midflight.observe.summary import Summary


class Callbacks(msgspec.Struct, frozen=True):
    """Each is called with a line of the journal, `on_end` with the summary."""

    on_step: Callable[[StepLine], object] | None = None
    on_evaluation: Callable[[EvaluationLine], object] | None = None
    on_checkpoint: Callable[[CheckpointLine], object] | None = None
    on_end: Callable[[Summary], object] | None = None

    def hear(self, line: Line) -> None:
        """Calls the function that is for such a line, if there is one."""
        match line:
            case StepLine() if self.on_step is not None:
                self.on_step(line)
            case EvaluationLine() if self.on_evaluation is not None:
                self.on_evaluation(line)
            case CheckpointLine() if self.on_checkpoint is not None:
                self.on_checkpoint(line)
            case _:
                pass
