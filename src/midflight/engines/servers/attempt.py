"""One request at a server: which version made which of its tokens. Synchronous (I6)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from midflight.engines.servers.server import Piece
from midflight.types import Segment, Version


@dataclass(frozen=True, slots=True)
class _Change:
    """Weights that went live while the request ran."""

    version: Version
    kv_version: Version
    late: int
    """By how many tokens the server may label too early after this change."""


class Attempt:
    """Labels tokens as they come, never newer than they are, and knows at the end what the server says of them.

    A server tells at the end of an answer which tokens are of which weights, so what comes before is labelled by what is known
    here: after a change the next piece may have been on its way, and keeps the label before. Where a request ran under weights
    that changed, keys made before the change stay in `keep` and are recomputed otherwise.
    """

    def __init__(self, version: Version) -> None:
        self._changes = [_Change(version, version, 0)]
        self._label = version
        self._num_behind = 0
        """Pieces to come that may be of the weights before: one that was on its way, and what the server labels too early."""
        self.num_tokens = 0

    def changed(self, version: Version, *, recomputed: bool, late: int) -> None:
        """New weights went live; `late`: tokens after it that the server's account may give to them wrongly."""
        kv_version = version if recomputed else self._changes[-1].kv_version
        self._changes.append(_Change(version, kv_version, late))
        self._num_behind = 1 + late

    def labels(self, *, any_tokens: bool) -> tuple[Version, Version]:
        """Version and kv_version of the piece that has come."""
        if not self._num_behind:
            self._label = self._changes[-1].version
        elif any_tokens:
            self._num_behind -= 1
        return self._label, self._kv(self._label)

    def account(self, piece: Piece) -> tuple[Segment, ...]:
        """The server's own account of all tokens; empty where it gives none, or one that does not fit what was received."""
        spans = [(int(label), start, end) for label, start, end in piece.spans if label.isdigit()]
        if len(spans) != len(piece.spans) or not spans or spans[-1][2] != self.num_tokens or not _contiguous(spans):
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


def _contiguous(spans: list[tuple[int, int, int]]) -> bool:
    """From the first token on, without a gap, and never back to an older version."""
    return spans[0][1] == 0 and all(a[2] == b[1] and a[0] <= b[0] for a, b in pairwise(spans))
