"""Ten thousand live sessions, each with a recorded turn, are no burden; the next one is told to come later."""

from __future__ import annotations

import itertools
import statistics
import tracemalloc
from collections.abc import Callable

import pytest
from tests.gateway.generating import letters
from tests.gateway.offered import DEFAULTS

from midflight.errors import Overloaded, SessionClosed
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, RolloutKey, SamplingParams
from midflight.types.facts import record_nothing

SESSIONS = 10_000
WEIGHED = 1_000
"""Of them: what notes every allocation takes three times as long."""
PORTION = 250
"""They are weighed in portions. What else the process allocates once, half a megabyte on a busy machine, falls into one of them."""
PROMPT, ANSWER = 100, 100


class InstantGenerator:
    def __init__(self) -> None:
        self.forgotten: set[str] = set()

    async def generate(self, answer: Answer, *, affinity: str, may_abort: bool, told: Callable[[], None]) -> None:
        """At once: `ANSWER` letters."""
        answer.accept(letters(ANSWER), vocab_size=262)

    def forget(self, affinity: str) -> None:
        self.forgotten.add(affinity)


def test_ten_thousand_sessions_keep_their_tokens_in_little_memory_and_the_next_is_refused() -> None:
    async def main() -> None:
        generator = InstantGenerator()
        gateway = Gateway(
            generator, scripted_tokenizer(), record_nothing, model="policy", limits=EngineLimits(4096, 262), max_sessions=SESSIONS
        )
        tracemalloc.start()
        weights: list[int] = []
        handles = []
        for number in range(SESSIONS):
            handle = gateway.open(RolloutKey(GroupKey(0, number), 0), sampling=SamplingParams(max_tokens=ANSWER), tracked=True)
            session = gateway.session_for(path_token=handle.api_key, api_key=None)
            question = f"{number:06}" + "q" * (PROMPT - 9)
            await gateway.answers(gateway.prepare(session, CompletionCall((Messages(({"role": "user", "content": question},)),))))
            handles.append(handle)
            done = len(handles) - 1  # what the first one fills for all is no session's
            if done <= WEIGHED and done % PORTION == 0:
                weights.append(tracemalloc.get_traced_memory()[0])
            if done == WEIGHED:
                tracemalloc.stop()
        of_portions = [after - before for before, after in itertools.pairwise(weights)]
        assert statistics.median(of_portions) / PORTION < 8_000, "a session of 200 tokens: its tokens, its tree, its address"
        with pytest.raises(Overloaded, match="10000 are open") as refused:
            gateway.open(RolloutKey(GroupKey(0, SESSIONS), 0), sampling=DEFAULTS, tracked=True)
        assert refused.value.status == 429 and refused.value.retry_after_seconds >= 1
        records = [gateway.close(handle.session_id) for handle in handles]
        assert sum(row.num_trainable for record in records for row in record.rows) == SESSIONS * ANSWER
        assert len(gateway.registry) == 0 and len(generator.forgotten) == SESSIONS
        with pytest.raises(SessionClosed):
            gateway.session_for(path_token=handles[-1].api_key, api_key=None)

    run_virtual(main())
