"""The measured speed of answers, per request. Synchronous."""

MEMORY = 0.98
"""The weight of all earlier answers at each new one. About the last fifty answers count."""


class AnswerSpeed:
    """The tokens per second that one request gets.

    tokens per second = tokens of the last answers / seconds from an engine's taking each until
    its end
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self.longest = 0
        """Tokens of the longest answer."""

    def answered(self, num_tokens: int, seconds: float) -> None:
        self._tokens = MEMORY * self._tokens + num_tokens
        self._seconds = MEMORY * self._seconds + seconds
        self.longest = max(self.longest, num_tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """None before anything was measured."""
        if self._tokens <= 0 or self._seconds <= 0:
            return None
        return self._tokens / self._seconds
