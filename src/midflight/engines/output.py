"""What a step gives out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from midflight.errors import RequestRejected
from midflight.types import Finish, Version

Ints = NDArray[np.int64]


def _no_ints() -> Ints:
    return np.empty(0, dtype=np.int64)


def _no_floats() -> NDArray[np.float64]:
    return np.empty(0)


def _no_columns() -> Ints:
    return np.empty((0, 0), dtype=np.int64)


def _no_float_columns() -> NDArray[np.float64]:
    return np.empty((0, 0))


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """At most one token for each request of a step, as arrays of equal length, and the requests that ended.

    All tokens were sampled under `version`. A request that ends with a token has it in the same output.
    """

    version: Version
    handles: Ints = field(default_factory=_no_ints)
    token_ids: Ints = field(default_factory=_no_ints)
    logprobs: NDArray[np.float64] = field(default_factory=_no_floats)
    kv_versions: Ints = field(default_factory=_no_ints)
    top_ids: Ints = field(default_factory=_no_columns)
    """[R, W] the likeliest ids at each token's place, likeliest first, filled up with -1; W is 0 where nobody asks."""
    top_logprobs: NDArray[np.float64] = field(default_factory=_no_float_columns)
    """[R, W]"""
    outlets: Ints = field(default_factory=_no_ints)
    finishes: tuple[tuple[int, int, Finish], ...] = ()
    """(handle, outlet, how it ended)"""
    failures: tuple[tuple[int, int, RequestRejected], ...] = ()
    """(handle, outlet, why it could not go on): these requests ended too."""
    touched: frozenset[int] = frozenset()
    """Outlets with a request in the step, also those whose request got no token yet."""
    started: float = 0.0
    ended: float = 0.0
    num_running: int = 0

    def for_outlet(self, outlet: int) -> StepOutput:
        """The part of one outlet."""
        if len(self.touched) == 1:
            return self
        rows = np.flatnonzero(self.outlets == outlet)
        top_ids = self.top_ids[rows] if self.top_ids.size else self.top_ids
        width = int((top_ids >= 0).sum(1).max(initial=0))
        return StepOutput(
            version=self.version,
            handles=self.handles[rows],
            token_ids=self.token_ids[rows],
            logprobs=self.logprobs[rows],
            kv_versions=self.kv_versions[rows],
            top_ids=top_ids[:, :width],
            top_logprobs=(self.top_logprobs[rows] if self.top_logprobs.size else self.top_logprobs)[:, :width],
            outlets=self.outlets[rows],
            finishes=tuple(f for f in self.finishes if f[1] == outlet),
            failures=tuple(f for f in self.failures if f[1] == outlet),
            touched=frozenset({outlet}),
            started=self.started,
            ended=self.ended,
            num_running=self.num_running,
        )


Top: TypeAlias = "tuple[tuple[int, float], ...] | None"
"""The likeliest (id, log-probability) at a token's position; `None` for a request that did not ask."""
TokenRow: TypeAlias = tuple[int, int, float, int, Top]
"""One token: the handle of its request, the id, its log-probability, the version of the oldest key, alternatives."""


class Outlet(Protocol):
    """Where the tokens of some requests go. Called on the event loop; never waits."""

    def put(self, step: StepOutput) -> None: ...
    def fail(self, error: Exception) -> None:
        """The engine died: nothing more will come."""
        ...
