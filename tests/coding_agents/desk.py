"""A gateway over two scripted engines on a socket, in the event loop of the test: its sessions, engines and weights can be touched."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.coding_agents import scripts
from tests.corpus.recorded import recording
from tests.shares import Heads, check_trained_share

from midflight.config.sections import Config
from midflight.gateway.http.http import build_app
from midflight.gateway.sessions.registry import OpenSession
from midflight.run.rollout.serving import Serving
from midflight.testing.script import Replies, play
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.text import ChatTemplate, Tokenizer
from midflight.text.byte_tokenizer import CHAT_TEMPLATE, END, byte_tokenizer
from midflight.types import Feature, GroupKey, PauseMode, RolloutKey, SamplingParams, SessionRecord, Turn, WeightManifest
from midflight.types.facts import TurnKept, record_nothing
from midflight.wire.server import serve_app

KEY = RolloutKey(GroupKey(epoch=0, index=3, attempt=0), sample=1)
ABLE = replace(CAPABLE, max_context=2_000_000, features=frozenset(Feature) - {Feature.SAMPLING_MASKS})
"""A token is a byte here, so prompts of these agents have some ten thousand. These engines record no masks of truncated sampling."""


_THOUGHT = "('<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' if message.reasoning_content else '')"
TEMPLATE = CHAT_TEMPLATE.replace("~ (message.content or '')", f"~ {_THOUGHT} ~ (message.content or '')")
"""Of a model that is shown again what it thought."""


class RealTimeEngine(ScriptedEngine):
    """Its requests need some turns of the loop to see a pause, in which the real clock goes on, unlike the virtual one."""

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        for _ in range(10):
            await asyncio.sleep(0)


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), template=ChatTemplate(TEMPLATE, {}), eos_token_ids=frozenset({END}))


@dataclass
class Desk:
    """One session, and what became of it."""

    serving: Serving
    engines: list[ScriptedEngine]
    url: str
    heads: Heads
    """The fields that the heads of its answers named."""
    turns: list[Turn] = field(default_factory=list[Turn])
    session: OpenSession | None = None

    def open(self) -> OpenSession:
        def kept(told: TurnKept) -> None:
            self.turns.append(told.turn)

        self.serving.gateway.on_turn = kept
        self.session = self.serving.gateway.open(KEY, sampling=SamplingParams(max_tokens=4096), tracked=True)
        return self.session

    def close(self) -> SessionRecord:
        assert self.session is not None
        return self.serving.gateway.close(self.session.session_id)

    async def disturb(self, *, versions: int = 10) -> None:
        """Pauses in all modes, aborts, deaths of both engines and new weights, again and again while requests are answered; ended by
        cancellation. Then all that stands still is resumed by the caller."""
        done, number = 0, 0
        while True:
            number += 1
            await self._while_generating()
            match number % 4:
                case 0:
                    await self.serving.control.pause(list(PauseMode)[number // 4 % 3])
                    await asyncio.sleep(0.02)
                    await self.serving.control.resume()
                case 1:
                    engine = self.engines[number // 4 % 2]
                    engine.die()
                    await asyncio.sleep(0.02)
                    engine.revive()
                case 2:
                    await self.serving.control.abort(None)
                case _ if done < versions:
                    done += 1
                    await self.serving.handover.publish(WeightManifest(done, f"weights {done}", "scripted", "", ()))
                case _:
                    pass

    async def _while_generating(self) -> None:
        """Waits until an engine has made some tokens of an answer; polls, as nobody tells."""
        while not any(engine._running for engine in self.engines):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)


@asynccontextmanager
async def desk(rule: Callable[[str], str] = scripts.reply, *, step_seconds: float = 0.0, sampling: str = "request") -> AsyncIterator[Desk]:
    policy = Replies(rule, tokenizer())
    engines: list[ScriptedEngine] = [
        RealTimeEngine(name, script=policy, capabilities=ABLE, step_seconds=step_seconds, chunk_tokens=8) for name in ("left", "right")
    ]
    config = Config.model_validate({"gateway": {"reasoning_format": "think", "sampling": sampling}})
    serving = Serving(config, tokenizer(), engines, record=record_nothing, version=0, anonymous=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving.gateway.address = url
        heads = Heads(build_app(serving.gateway, serving.control))
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            parts = [
                tasks.create_task(serve_app(recording(heads), listener, ready=ready.set)),
                tasks.create_task(serving.watch()),
                tasks.create_task(serving.rejoin.run()),
            ]
            await ready.wait()
            try:
                yield Desk(serving, engines, url, heads)
            finally:
                for part in parts:
                    part.cancel()


def check_every_token_is_trained_once(record: SessionRecord, turns: list[Turn]) -> None:
    """Each turn's output is a run of its own in exactly one row, with its log-probabilities; nothing else is trained, nothing is lost."""
    check_trained_share(sum(len(turn.output_ids) for turn in turns), record.masked)
    assert record.dropped == {} and record.masked == {} and record.failed_requests == 0
    said = sorted(turn.output_ids for turn in turns)
    found: list[tuple[int, ...]] = []
    for row in record.rows:
        run: list[int] = []
        for token, trained in zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True):
            if trained:
                run.append(token)
            elif run:
                found.append(tuple(run))
                run = []
        found += [tuple(run)] if run else []
    assert sorted(found) == said
    assert sum(int(row.loss_mask.sum()) for row in record.rows) == sum(len(turn.output_ids) for turn in turns)


def check_answers_are_those_of_a_calm_run(
    engines: list[ScriptedEngine], turns: list[Turn], rule: Callable[[str], str] = scripts.reply
) -> None:
    """Each turn has the tokens and log-probabilities that its own request has without any disturbance (I5)."""
    policy = Replies(rule, tokenizer())
    asked = {request.input_ids: request for engine in engines for request in engine.requests}
    for turn in turns:
        request = asked[turn.prompt_ids]
        calm = play(policy, request, tokenizer())
        assert turn.output_ids == calm.token_ids and turn.logprobs == calm.logprobs


def scratch(folder: Path) -> tuple[Path, Path]:
    """A folder to work in, and a home."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    (work / "a.txt").write_text("one two three\n")
    (work / "b.txt").write_text("four five\n")
    (work / "long.txt").write_text(scripts.LONG)
    (work / "longer.txt").write_text(scripts.LONG * 2)
    return work, home


def told(record: SessionRecord) -> str:
    """The rows as text, for a failure."""
    return "\n".join(f"{len(row.token_ids)} tokens ... {tokenizer().decode(row.token_ids[-900:].tolist())!r}" for row in record.rows)
