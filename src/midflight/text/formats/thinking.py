"""The thinking block at the beginning of a message."""

from dataclasses import dataclass
from enum import Enum, auto

from midflight.text.formats.lark import Lark


class Begun(Enum):
    """How far the prompt has taken the thinking block."""

    NOT = auto()
    OPENED = auto()
    """The message begins inside it."""
    CLOSED = auto()
    """The model was told not to think."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A block at the beginning of a message. Whitespace just inside and just outside the markers
    belongs to no text.
    """

    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing)

    def begun(self, prompt_text: str | None) -> Begun:
        """How far the prompt has taken the block. A prompt of ids (`None`) has not opened it."""
        end = (prompt_text or "").rstrip()
        if end.endswith(self.opening):
            return Begun.OPENED
        return Begun.CLOSED if end.endswith(self.closing) else Begun.NOT

    def before(self, lark: Lark, rule: str, prompt_text: str | None) -> str | None:
        """Rules in which `start` is `rule` after a block: one that ends if the prompt opened it,
        else one that may come. `None` where no thinking can come."""
        match self.begun(prompt_text):
            case Begun.OPENED:
                start = f"start: thought GAP? {rule}"
            case Begun.NOT:
                start = f"start: ({lark.marker(self.opening)} thought GAP?)? {rule}"
            case Begun.CLOSED:
                return None
        return "\n".join([start, lark.ending("thought", self.closing), r"GAP: /\n{1,2}/"])


THINK = Thinking("<think>", "</think>")
MISTRAL_THINK = Thinking("[THINK]", "[/THINK]")
