"""Text without the whitespace that belongs to the markers around it."""

from __future__ import annotations

_SPACES = " \t\r\n"


class TrimmedText:
    """Takes text as it comes and gives it on. Whitespace at a touched place is dropped if the text begins or ends there."""

    def __init__(self) -> None:
        self._held: list[str] = []
        """Whitespace after which nothing has come yet."""
        self._begun = False
        self.touched = False
        """Whether only whitespace came since the last `touch`."""

    def touch(self) -> None:
        """A marker stands here."""
        self.touched = True

    def add(self, text: str) -> str:
        """What is certain now: text up to its last letter that is no whitespace."""
        body = text.rstrip(_SPACES)
        if not body:
            self._held.append(text)
            return ""
        given = "".join([*self._held, body])
        if self.touched and not self._begun:
            given = given.lstrip(_SPACES)
        self._held = [text[len(body) :]]
        self._begun, self.touched = True, False
        return given

    def end(self) -> str:
        """The rest, when the text has ended."""
        return "" if self.touched else "".join(self._held)
