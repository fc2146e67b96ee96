"""An answer that is being generated or has been: what is known of it, and its readers. Each reader is told all of it.

Usually there is one reader: the client who asked. A retry is another one, who begins at the first token.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from midflight.gateway.sessions.call import Answer, Delta, Event
from midflight.text.formats import Piece

if TYPE_CHECKING:
    from midflight.gateway.answers.plan import Job

Mark = tuple[int, int, int]
"""How much of a choice somebody was told: texts, tokens, pieces."""

_START: Mark = (0, 0, 0)


class Told:
    """One choice so far. It grows with the tokens; the events that brought them are not kept."""

    __slots__ = ("answer", "logprobs", "pieces", "texts", "token_ids", "top_logprobs")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.pieces: list[Piece] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        """One for each token, or none at all."""
        self.answer: Answer | None = None

    @property
    def mark(self) -> Mark:
        return len(self.texts), len(self.token_ids), len(self.pieces)

    def add(self, event: Event) -> None:
        if isinstance(event, Answer):
            self.answer = event
            return
        if event.text:
            self.texts.append(event.text)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.pieces += event.pieces
        self.top_logprobs += event.top_logprobs

    def since(self, mark: Mark, choice: int) -> Delta:
        """All that came after `mark`, as one."""
        texts, tokens, pieces = mark
        return Delta(
            choice,
            "".join(self.texts[texts:]),
            tuple(self.token_ids[tokens:]),
            tuple(self.logprobs[tokens:]),
            tuple(self.pieces[pieces:]),
            tuple(self.top_logprobs[tokens:]),
        )


class Ongoing:
    """Synchronous: the gateway puts events in, readers take them. It ends once, with its answers or with an error.

    Without readers it goes on for `orphan_seconds`; 0 cancels it at once. A new reader keeps it alive again.
    """

    __slots__ = ("_choices", "_readers", "_scope", "created", "delivered", "ended", "error", "job", "orphan_seconds")

    def __init__(self, job: Job, *, created: int, orphan_seconds: float) -> None:
        """`created`: Unix seconds, as every reader is told."""
        self.job = job
        self.created = created
        self.orphan_seconds = orphan_seconds
        self.ended = False
        self.error: Exception | None = None
        self.delivered = False
        """Whether some reader was told all of it."""
        self._choices: dict[int, Told] = {}
        self._readers: list[Reader] = []
        self._scope: asyncio.Timeout | None = None

    # --- For who generates ---------------------------------------------------------------------------------------------

    def runs_in(self, scope: asyncio.Timeout) -> None:
        """Its generation is cancelled by the deadline of this scope, which the close of its session uses too."""
        self._scope = scope

    def put(self, event: Event) -> None:
        """The sink of its generation."""
        told = self._choices.get(event.choice)
        if told is None:
            told = self._choices[event.choice] = Told()
        told.add(event)
        for reader in self._readers:
            reader.hear(event.choice)

    def end(self, error: Exception | None = None) -> None:
        self.ended, self.error, self._scope = True, error, None
        for reader in self._readers:
            reader.wake()

    # --- For readers ---------------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Nobody reads it, and nobody was told all of it."""
        return not self._readers and not self.delivered

    @property
    def is_read(self) -> bool:
        return bool(self._readers)

    @property
    def is_cancelled(self) -> bool:
        """Nobody read it for too long: what is left of it is its clearing up."""
        return self._scope is not None and self._scope.expired()

    @property
    def answers(self) -> list[Answer]:
        """Finished ones, in order of their choices."""
        return [told.answer for _, told in sorted(self._choices.items()) if told.answer is not None]

    def join(self) -> Reader:
        """A reader from the first token on."""
        reader = Reader(self, self._choices)
        self._readers.append(reader)
        self._hold_until(None)
        return reader

    def leave(self, reader: Reader) -> None:
        """Leaving again does nothing."""
        if reader in self._readers:
            self._readers.remove(reader)
            if not self._readers:
                self._hold_until(asyncio.get_running_loop().time() + self.orphan_seconds)

    def told(self, choice: int) -> Told:
        return self._choices[choice]

    def _hold_until(self, when: float | None) -> None:
        """A session that has closed ends it by the same scope, and nothing holds that up."""
        if self._scope is not None and not self._scope.expired() and not self.job.session.closed:
            self._scope.reschedule(when)


class Reader:
    """One client's place in an answer. What it has not taken yet is merged, so a slow reader costs no memory of its own."""

    __slots__ = ("_marks", "_news", "_waiter", "done", "gone", "ongoing")

    def __init__(self, ongoing: Ongoing, choices: dict[int, Told]) -> None:
        self.ongoing = ongoing
        self.gone = False
        """Whether the client has left before he was told all."""
        self.done = False
        """Whether the last byte was sent."""
        self._marks: dict[int, Mark] = {}
        self._news: dict[int, None] = dict.fromkeys(choices)
        self._waiter: asyncio.Future[None] | None = None

    def hear(self, choice: int) -> None:
        self._news[choice] = None
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[Event]:
        """What is new: one event for each choice, and its answer where it has ended."""
        events: list[Event] = []
        for choice in self._news:
            told, mark = self.ongoing.told(choice), self._marks.get(choice, _START)
            if (now := told.mark) != mark:
                events.append(told.since(mark, choice))
                self._marks[choice] = now
            if told.answer is not None:
                events.append(told.answer)
        self._news.clear()
        return events

    async def wait(self) -> None:
        """Waits for news, for the end, for the client's going or for a `wake`."""
        if self._news or self.ongoing.ended or self.gone:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def wait_for_end(self) -> None:
        """Waits for the end, or for the client's going."""
        while not (self.ongoing.ended or self.gone):
            self._news.clear()
            await self.wait()

    def go(self) -> None:
        """The client has left: he is told no more. After the last byte it means nothing."""
        if not self.done:
            self.gone = True
            self.ongoing.leave(self)
            self.wake()

    def told_all(self) -> None:
        """The last byte was sent."""
        self.done = not self.gone
        self.ongoing.delivered |= self.done and self.ongoing.error is None
