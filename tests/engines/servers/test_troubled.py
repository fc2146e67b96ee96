"""Whatever befalls a server in the middle of a handover, no answer shows it, and the fleet is whole again when the server is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from starlette.responses import Response
from tests.engines.servers.troubled import NUM_TOKENS, STAGE_SECONDS, Theatre, Troubled, TroubledSglang, TroubledVllm, letter

from midflight.run.rollout import serving
from midflight.types import Chunk, Finish, FinishReason

pytestmark = pytest.mark.filterwarnings(
    # Python 3.13.0 alone: the server that a test has ended forgets that nobody waits for it, when a connection is collected after it.
    "ignore:Exception ignored in. <function _SelectorTransport.__del__:pytest.PytestUnraisableExceptionWarning"
)

COMMIT_SECONDS = 0.8
DOWN_SECONDS = 0.15
FROZEN_SECONDS = 1.1


def happens(what: str, server: Troubled, site: Theatre) -> Callable[[], Awaitable[Response | None]]:
    """What a call meets; `None` lets the server do what it was asked, before or after."""
    loop = asyncio.get_running_loop()

    def come_back() -> None:
        site.spawn(server.line.open())

    async def dies() -> None:
        server.line.cut()
        server.restart()
        loop.call_later(DOWN_SECONDS, come_back)
        await asyncio.Event().wait()

    async def freezes() -> None:
        server.line.freeze()
        loop.call_later(FROZEN_SECONDS, server.line.thaw)

    async def refuses() -> Response:
        return Response("no", status_code=500)

    async def closes() -> None:
        server.line.cut()
        come_back()
        await asyncio.Event().wait()

    async def does_it_and_closes() -> None:
        server.line.cut()
        come_back()

    async def never_answers() -> None:
        loop.call_later(FROZEN_SECONDS, lambda: site.spawn(dies()))
        await asyncio.Event().wait()

    async def companion_dies() -> None:
        site.kill_companion(1)

    return locals()[what]


def path_of(kind: type[Troubled], phase: str) -> str:
    own = {"label": kind.label_path, "pause": kind.pause[0], "load": kind.load, "resume": kind.resume_path}
    return own.get(phase, "/update_weight_version")


def check_answer(chunks: list[Chunk]) -> None:
    ids = [i for chunk in chunks for i in chunk.token_ids]
    assert ids == [letter(7 + p) for p in range(len(ids))], "unbroken"
    labels = [chunk.version for chunk in chunks for _ in chunk.token_ids]
    truth = [round(-1 - p) for chunk in chunks for p in chunk.logprobs]
    assert labels == sorted(labels), f"versions only grow: {labels}"
    assert all(label <= true for label, true in zip(labels, truth, strict=True)), f"no label is newer than the weights: {labels} {truth}"


def check_all(answers: list[list[Chunk]], *, num_unfinished: int) -> None:
    finished = [chunks for chunks in answers if chunks and chunks[-1].finish is not None]
    assert len(finished) >= len(answers) - num_unfinished
    for chunks in answers:
        check_answer(chunks)
    for chunks in finished:
        assert chunks[-1].finish == Finish(FinishReason.LENGTH)
        assert sum(len(chunk.token_ids) for chunk in chunks) == NUM_TOKENS


@pytest.mark.parametrize(
    ("kind", "way", "mode", "phase", "what"),
    [
        (TroubledSglang, "rolling", "auto", "label", "freezes"),
        (TroubledSglang, "rolling", "auto", "load", "dies"),
        (TroubledSglang, "rolling", "auto", "load", "does_it_and_closes"),
        (TroubledSglang, "barrier", "auto", "resume", "refuses"),
        (TroubledVllm, "rolling", "auto", "pause", "never_answers"),
        (TroubledVllm, "rolling", "auto", "relabel", "closes"),
        (TroubledVllm, "barrier", "recompute", "load", "companion_dies"),
        (TroubledVllm, "barrier", "auto", "relabel", "dies"),
        (TroubledVllm, "rolling", "recompute", "resume", "dies"),
    ],
)
@pytest.mark.timeout(60)
def test_no_answer_is_lost_and_the_fleet_is_whole_again(
    kind: type[Troubled], way: str, mode: str, phase: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5, I6, I7, over the wire: gateway, companion, server."""
    monkeypatch.setattr(serving, "HEALTH_SECONDS", 0.1)

    async def main() -> None:
        site = Theatre(kind, tmp_path, way=way, pause_mode=mode, commit_seconds=COMMIT_SECONDS)
        async with site.open(), asyncio.timeout(40):
            writers = [asyncio.create_task(site.write(f"w{k}")) for k in range(4)]
            await site.handover.publish(site.publish(1))
            victim = site.servers[1]
            victim.trouble_at, victim.trouble = path_of(kind, phase), happens(what, victim, site)
            async with asyncio.timeout(2 * (STAGE_SECONDS + COMMIT_SECONDS) + 2):  # the deadlines, and what they take on a slow machine
                await site.handover.publish(site.publish(2))
            await site.until_settled(2)
            await site.more_answers(4)
            assert victim.trouble is None, "it happened"
            assert [(s.truth, s.label, s.is_paused) for s in site.servers] == [(2, "2", False)] * 2
            assert not any(writer.done() for writer in writers), "nobody saw an error"
            for writer in writers:
                writer.cancel()
            check_all(site.answers, num_unfinished=len(writers))

    asyncio.run(main())
