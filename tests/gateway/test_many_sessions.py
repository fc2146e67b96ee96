"""Ten thousand live sessions, each with a recorded turn, are no burden; the next one is told to come later."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.gateway.generating import letters
from tests.gateway.offered import DEFAULTS

from midflight.errors import Overloaded, SessionClosed
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.sessions.registry import OpenSession
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, RolloutKey, SamplingParams
from midflight.types.facts import record_nothing

ROOT = Path(__file__).parents[2]
SESSIONS = 10_000
WEIGHED = 1_000
"""Of them: what notes every allocation takes three times as long."""
PROMPT, ANSWER = 100, 100


class InstantGenerator:
    def __init__(self) -> None:
        self.forgotten: set[str] = set()

    async def generate(self, answer: Answer, *, affinity: str, may_abort: bool, told: Callable[[], None]) -> None:
        """At once: `ANSWER` letters."""
        answer.accept(letters(ANSWER), vocab_size=262)

    def forget(self, affinity: str) -> None:
        self.forgotten.add(affinity)


async def opened(gateway: Gateway, number: int) -> OpenSession:
    """A session with a recorded turn."""
    handle = gateway.open(RolloutKey(GroupKey(0, number), 0), sampling=SamplingParams(max_tokens=ANSWER), tracked=True)
    session = gateway.session_for(path_token=handle.api_key, api_key=None)
    question = f"{number:06}" + "q" * (PROMPT - 9)
    await gateway.answers(gateway.prepare(session, CompletionCall((Messages(({"role": "user", "content": question},)),))))
    return handle


def made_gateway() -> tuple[Gateway, InstantGenerator]:
    generator = InstantGenerator()
    limits = EngineLimits(4096, 262)
    return Gateway(generator, scripted_tokenizer(), record_nothing, model="policy", limits=limits, max_sessions=SESSIONS), generator


def bytes_of_a_session() -> float:
    async def main() -> float:
        gateway, _ = made_gateway()
        tracemalloc.start()
        handles = [await opened(gateway, 0)]  # what the first one fills for all is no session's
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, WEIGHED + 1):
            handles.append(await opened(gateway, number))
        after, _ = tracemalloc.get_traced_memory()
        return (after - before) / WEIGHED

    return run_virtual(main())


def test_a_session_keeps_its_tokens_in_little_memory() -> None:
    """In a process of its own: after some tests of the same process a session took 8 150 bytes, and 7 505 in a new one."""
    weigh = "from tests.gateway.test_many_sessions import bytes_of_a_session; print(bytes_of_a_session())"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    told = subprocess.run([sys.executable, "-c", weigh], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert float(told.stdout) < 8_000, "a session of 200 tokens: its tokens, its tree, its address"


def test_ten_thousand_sessions_are_kept_and_the_next_is_refused() -> None:
    async def main() -> None:
        gateway, generator = made_gateway()
        handles = [await opened(gateway, number) for number in range(SESSIONS)]
        with pytest.raises(Overloaded, match="10000 are open") as refused:
            gateway.open(RolloutKey(GroupKey(0, SESSIONS), 0), sampling=DEFAULTS, tracked=True)
        assert refused.value.status == 429 and refused.value.retry_after_seconds >= 1
        records = [gateway.close(handle.session_id) for handle in handles]
        assert sum(row.num_trainable for record in records for row in record.rows) == SESSIONS * ANSWER
        assert len(gateway.registry) == 0 and len(generator.forgotten) == SESSIONS
        with pytest.raises(SessionClosed):
            gateway.session_for(path_token=handles[-1].api_key, api_key=None)

    run_virtual(main())
