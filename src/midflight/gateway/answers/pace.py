"""How quickly answers come: what one request gets of the engines, as measured. Synchronous."""

MEMORY = 0.98
"""Of what answers took: the last fifty count."""


class Pace:
    """tokens a second = tokens of the last answers / the seconds from when an engine took each
    until it was whole
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self.longest = 0
        """Tokens of the longest answer."""

    def answered(self, num_tokens: int, seconds: float) -> None:
        self._tokens = MEMORY * self._tokens + num_tokens
        self._seconds = MEMORY * self._seconds + seconds
        self.longest = max(self.longest, num_tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """None before anything was measured."""
        return self._tokens / self._seconds if self._tokens > 0 and self._seconds > 0 else None
