"""Turns that were complete before a crash, given again to the agent that asks the same again (I8)."""

from __future__ import annotations

from collections.abc import Iterable

from midflight.types import Chunk, GenerateRequest, Turn


class RecordedTurns:
    """The turns of one rollout that had not ended. Each is given once, to the first request with its prompt that has room for it."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns = list(turns)

    def take(self, request: GenerateRequest) -> Turn | None:
        for place, turn in enumerate(self._turns):
            if turn.prompt_ids == request.input_ids and len(turn.output_ids) <= request.sampling.max_tokens:
                return self._turns.pop(place)
        return None


class Replay:
    """A recorded turn as a generation: the same tokens, log-probabilities and versions, without an engine."""

    def __init__(self, turn: Turn) -> None:
        self.num_overshoot = turn.num_overshoot
        self.num_resumes = turn.num_resumes
        self._chunks = iter(_chunks(turn))

    def __aiter__(self) -> Replay:
        return self

    async def __anext__(self) -> Chunk:
        """Never waits."""
        chunk = next(self._chunks, None)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        return None


def _chunks(turn: Turn) -> list[Chunk]:
    """One for each segment; the finish comes last, on a chunk of its own."""
    parts = [Chunk(turn.output_ids[s.start : s.end], turn.logprobs[s.start : s.end], s.version, s.kv_version) for s in turn.segments]
    last = turn.segments[-1] if turn.segments else None
    return [*parts, Chunk((), (), last.version if last else 0, last.kv_version if last else 0, turn.finish)]
