"""One request at a server, and which version made which of its tokens. Synchronous (I6)."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from itertools import pairwise

from midflight.engines.servers.server import EventTokens, cut
from midflight.engines.streams import ChunkStream
from midflight.types import GenerateRequest, Segment, Version


@dataclass(frozen=True, slots=True)
class _Change:
    """Weights that went live while the request ran."""

    version: Version
    kv_version: Version
    late: int
    """How many tokens after this change the server may give to the new weights wrongly."""


class Attempt:
    """Labels tokens as they come, never newer than they are, and knows at the end what the server says of them.

    A server tells at the end of an answer which tokens are of which weights, so what comes before is labelled by what is known
    here: after a change the next event may have been on its way, and keeps the label before. Where a request ran under weights
    that changed, keys made before the change stay in `keep` and are recomputed otherwise.
    """

    def __init__(self, version: Version) -> None:
        self._changes = [_Change(version, version, 0)]
        self._label = version
        self._num_behind = 0
        """Events to come that may be of the weights before: one that was on its way, and what the server labels too early."""
        self.num_tokens = 0

    def changed(self, version: Version, *, recomputed: bool, late: int) -> None:
        """New weights went live; `late`: tokens after it that the server's account may give to them wrongly."""
        kv_version = version if recomputed else self._changes[-1].kv_version
        self._changes.append(_Change(version, kv_version, late))
        self._num_behind = 1 + late

    def labels(self, *, any_tokens: bool) -> tuple[Version, Version]:
        """Version and kv_version of the event that has come."""
        if not self._num_behind:
            self._label = self._changes[-1].version
        elif any_tokens:
            self._num_behind -= 1
        return self._label, self._kv(self._label)

    def account(self, event: EventTokens) -> tuple[Segment, ...]:
        """The server's own account of all tokens; empty where it gives none, or one that does not fit what was received."""
        spans = [(int(label), start, end) for label, start, end in event.spans if label.isdigit()]
        if len(spans) != len(event.spans) or not spans or spans[-1][2] != self.num_tokens or not _contiguous(spans):
            return ()
        starts = [min(start + self._late(version), self.num_tokens) if start else 0 for version, start, _ in spans]
        ends = [*starts[1:], self.num_tokens]
        return tuple(
            Segment(version, self._kv(version), start, end)
            for (version, _, _), start, end in zip(spans, starts, ends, strict=True)
            if end > start
        )

    def _kv(self, version: Version) -> Version:
        return next((c.kv_version for c in reversed(self._changes) if c.version == version), min(version, self._changes[0].kv_version))

    def _late(self, version: Version) -> int:
        return next((c.late for c in reversed(self._changes) if c.version == version), 0)


@dataclass(eq=False)
class ServerRequest:
    """A request that has not ended."""

    request: GenerateRequest
    stream: ChunkStream
    ends: tuple[int, ...]
    """The token ids that end its answer."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """At the server: of fixed length, because some match ids by their beginning, and never used twice."""
    attempt: Attempt | None = None
    """From when the server was asked."""
    reading: asyncio.Task[None] | None = None
    ended: bool = False

    def take(self, attempt: Attempt, event: EventTokens) -> EventTokens:
        """Labels the tokens of an event and gives them to the caller, up to one that ends the answer; returns what was given."""
        done = self.request.num_output_tokens + attempt.num_tokens
        event = cut(event, ends=self.ends, start=done, min_tokens=self.request.sampling.min_tokens)
        version, kv_version = attempt.labels(any_tokens=bool(event.token_ids))
        attempt.num_tokens += len(event.token_ids)
        tops = event.top_logprobs or (None,) * len(event.token_ids)
        for token_id, logprob, top in zip(event.token_ids, event.logprobs, tops, strict=True):
            self.stream.add(token_id, logprob, version=version, kv_version=kv_version, top=top)
        if event.finish is not None:
            self.stream.end(version, event.finish, attested=attempt.account(event))
        return event


def _contiguous(spans: list[tuple[int, int, int]]) -> bool:
    """From the first token on, without a gap, and never back to an older version."""
    return spans[0][1] == 0 and all(a[2] == b[1] and a[0] <= b[0] for a, b in pairwise(spans))
