"""The thinking block at the beginning of a message."""

from dataclasses import dataclass
from enum import Enum, auto

from midflight.text.formats.lark import Lark


class ThinkingState(Enum):
    """The part of the thinking block that the prompt already holds."""

    NOT = auto()
    OPENED = auto()
    """The prompt opens the block, so the message begins inside it."""
    CLOSED = auto()
    """The prompt closes the block, so the model does not think."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A block at the beginning of a message, between two markers. Whitespace just inside and just
    outside the markers belongs to no text.
    """

    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing)

    def begun(self, prompt_text: str | None) -> ThinkingState:
        """Returns how much of the block the prompt holds. A prompt of ids (`None`) holds nothing of
        it.
        """
        end = (prompt_text or "").rstrip()
        if end.endswith(self.opening):
            return ThinkingState.OPENED
        if end.endswith(self.closing):
            return ThinkingState.CLOSED
        return ThinkingState.NOT

    def before(self, lark: Lark, rule: str, prompt_text: str | None) -> str | None:
        """Grammar rules in which `start` is `rule` after a block. If the prompt opened the block,
        it must end first; otherwise a block is optional. `None` if no thinking can come.
        """
        match self.begun(prompt_text):
            case ThinkingState.OPENED:
                start = f"start: thought GAP? {rule}"
            case ThinkingState.NOT:
                start = f"start: ({lark.marker(self.opening)} thought GAP?)? {rule}"
            case ThinkingState.CLOSED:
                return None
        return "\n".join([start, lark.ending("thought", self.closing), r"GAP: /\n{1,2}/"])


THINK = Thinking("<think>", "</think>")
MISTRAL_THINK = Thinking("[THINK]", "[/THINK]")
