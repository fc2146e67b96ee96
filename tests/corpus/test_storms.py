"""What Claude Code and Codex ask of the gateway, as they were recorded: whatever happens to engines and weights, it is answered as if nothing had."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from tests.coding_agents.desk import (
    ABLE,
    check_answers_are_those_of_a_calm_run,
    check_every_token_is_trained_once,
    tokenizer,
)
from tests.corpus.recorded import read
from tests.gateway.asked import frames

from midflight.config.sections import Config
from midflight.gateway.http.http import build_app
from midflight.run.rollout.serving import Serving
from midflight.testing.script import Replies
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, PauseMode, RolloutKey, SamplingParams, Turn, WeightManifest
from midflight.types.facts import TurnKept, record_nothing
from midflight.wire.memory import MemoryTransport

BODIES = [one for one in read() if one.client in ("claude-cli", "codex_exec") and one.body.get("stream")]


def rule(prompt: str) -> str:
    """Thinking, words and two calls of a tool that the agent offers, or of one in a namespace; without tools words alone."""
    name = next((name for name in ("multi_agent_v1__spawn_agent", "exec_command", "Bash") if f'"{name}"' in prompt), None)
    calls = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"input": "{n}"}}}}\n</tool_call>' for n in "ab") if name else ""
    return f"<think>\nI think of it, at some length.\n</think>\n\nI do both of them at once, one beside the other.\n{calls}"


def said(path: str, text: str) -> list[Any]:
    """What a stream comes to, without its ids: each item or block with all its parts, how it ended, and what it counted."""
    blocks: dict[int, list[str]] = {}
    ended: list[Any] = []
    for frame in frames(text):
        assert frame["type"] != "error", frame
        place = frame.get("index", frame.get("output_index", 0))
        begun = frame.get("content_block") or (frame.get("item") if frame["type"].endswith("added") else None)
        if begun:
            blocks.setdefault(place, [begun["type"], begun.get("namespace") or "", begun.get("name") or "", ""])
        delta = frame.get("delta")
        if isinstance(delta, str):
            blocks[place][3] += delta
        elif delta and "type" in delta:
            blocks[place][3] += delta.get("text", delta.get("thinking", delta.get("partial_json", "")))
        elif delta or frame["type"] == "response.completed":
            ended.append((delta and delta["stop_reason"], frame.get("usage") or frame["response"]["usage"]))
    assert ended, path
    return [blocks, ended]


async def happens(serving: Serving, engines: list[ScriptedEngine], what: str) -> None:
    """Again and again, for longer than any answer takes without it. Waits for the end of it."""
    for number in range(7):
        await asyncio.sleep(0.05)
        each = {"everything": ("aborts", "death", "weights", *PauseMode), "pauses": tuple(PauseMode)}.get(what, (what,))
        match each[number % len(each)]:
            case "aborts":
                await serving.control.abort(None)
            case "death":
                engines[number % 2].die()
                await asyncio.sleep(0.05)
                engines[number % 2].revive()
            case "weights":
                await serving.handover.publish(WeightManifest(number + 1, f"weights {number + 1}", "scripted", "", ()))
            case "nothing":
                pass
            case mode:
                await serving.control.pause(PauseMode(mode))
                await asyncio.sleep(0.3)
                await serving.control.resume()


async def all_said(what: str) -> tuple[list[list[Any]], list[Turn]]:
    """Every body at once, each in a session of its own, while that happens; and the turn that was kept of each."""
    engines = [ScriptedEngine(name, script=Replies(rule, tokenizer()), capabilities=ABLE, chunk_tokens=8) for name in ("left", "right")]
    serving = Serving(
        Config.model_validate({"gateway": {"reasoning_format": "think"}}),
        tokenizer(),
        engines,
        record=record_nothing,
        version=0,
        anonymous=False,
    )
    serving.gateway.address = "http://memory"
    turns: dict[int, Turn] = {}

    def kept(told: TurnKept) -> None:
        assert turns.setdefault(told.key.group.index, told.turn) is told.turn

    serving.gateway.on_turn = kept
    async with asyncio.TaskGroup() as tasks:
        parts = [tasks.create_task(part) for part in (serving.watch(), serving.rejoin.run())]
        transport = MemoryTransport(build_app(serving.gateway, serving.control), tasks)
        async with httpx2.AsyncClient(transport=transport, base_url="http://memory", timeout=None) as http:
            handles = [
                serving.gateway.open(RolloutKey(GroupKey(0, number), 0), sampling=SamplingParams(max_tokens=4096), tracked=True)
                for number in range(len(BODIES))
            ]
            asked = [
                tasks.create_task(http.post(handle.base_url.removesuffix("/v1") + one.path, json=one.body))
                for handle, one in zip(handles, BODIES, strict=True)
            ]
            await happens(serving, engines, what)
            answers = [await each for each in asked]
        for part in parts:
            part.cancel()
    assert [answer.status_code for answer in answers] == [200] * len(BODIES)
    for number, handle in enumerate(handles):
        check_every_token_is_trained_once(serving.gateway.close(handle.session_id), [turns[number]])
    check_answers_are_those_of_a_calm_run(engines, list(turns.values()), rule)
    return [said(one.path, answer.text) for one, answer in zip(BODIES, answers, strict=True)], list(turns.values())


CALM: list[list[Any]] = []


@pytest.mark.parametrize("what", ["aborts", "death", "weights", "pauses", "everything"])
def test_i5_whatever_happens_coding_agents_are_answered_the_same(what: str) -> None:
    CALM[:] = CALM or run_virtual(all_said("nothing"))[0]
    assert {one.client for one in BODIES} == {"claude-cli", "codex_exec"}
    told, turns = run_virtual(all_said(what))
    assert told == CALM
    disturbed = [turn for turn in turns if turn.num_resumes or len({part.version for part in turn.segments}) > 1]
    assert len(disturbed) > len(turns) // 2
