"""Memory of the gateway with many live sessions of 2 000 tokens over four turns: `python
gateway_memory.py [SESSIONS]`.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from smoke import options_of

from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.sessions.request import Asked, CompletionCall, Messages
from midflight.observe.prometheus import Metrics
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.types import Chunk, Finish, FinishReason, GroupKey, Json, RolloutKey, SamplingParams

TURNS = 4
PROMPT = 247
ANSWER = 250
"""Per turn: 247 letters of the user, 250 tokens of answer, and the template's three marks."""


class InstantGenerator:
    async def generate(
        self, answer: Answer, *, affinity: str, may_abort: bool, told: Callable[[], None]
    ) -> None:
        """At once."""
        letters = b"abcdefghijklmnopqrstuvwxyz"
        sampling = answer.request.sampling
        ids = tuple(letters[(sampling.seed + k) % 26] for k in range(sampling.max_tokens))
        chunk = Chunk(
            ids, tuple(-0.001 * k for k in range(len(ids))), 0, 0, Finish(FinishReason.LENGTH)
        )
        answer.accept(chunk, vocab_size=262)

    def forget(self, affinity: str) -> None:
        return None


def resident_mb() -> float:
    return next(
        int(line.split()[1]) / 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )


async def main(sessions: int) -> None:
    with TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(Path(folder))
    limits = EngineLimits(max_context=8192, vocab_size=262)
    gateway = Gateway(
        cast(Generator, InstantGenerator()),
        tokenizer,
        Metrics().apply,
        model="policy",
        limits=limits,
        max_sessions=sessions,
    )
    empty = resident_mb()
    started = time.process_time()
    for number in range(sessions):
        handle = gateway.open(
            RolloutKey(GroupKey(0, number), 0),
            sampling=SamplingParams(max_tokens=ANSWER),
            tracked=True,
        )
        session = gateway.session_for(path_token=handle.api_key, api_key=None)
        messages: list[dict[str, Json]] = []
        for turn in range(TURNS):
            messages.append(
                {"role": "user", "content": f"{number:06d}.{turn:02d}".ljust(PROMPT, "q")}
            )
            call = CompletionCall(
                sources=(Messages(tuple(messages)),), asked=Asked(max_tokens=ANSWER)
            )
            [answer] = await gateway.answers(gateway.prepare(session, call))
            messages.append({"role": "assistant", "content": answer.text})
    spent = time.process_time() - started
    full = resident_mb()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = sessions * TURNS * (PROMPT + ANSWER + 3)
    print(
        f"{sessions} sessions of {tokens // sessions} tokens in {TURNS} turns: {full:.0f} MB "
        f"resident ({empty:.0f} MB before, peak {peak:.0f} MB), "
        f"{(full - empty) * 2**20 / tokens:.1f} bytes a token; "
        f"{1e6 * spent / (sessions * TURNS):.0f} us CPU a turn"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("sessions", type=int, nargs="?", default=10_000)
    asyncio.run(main(options_of(parser, sessions=20).sessions))
