"""Coding agents do whole tasks unmodified: they read, edit, run a command, ask agents of theirs, forget and finish."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from tests.coding_agents.clis import Ended, aider, claude_code, codex, gemini_cli, opencode, qwen_code
from tests.coding_agents.desk import (
    Desk,
    check_answers_are_those_of_a_calm_run,
    check_every_token_is_trained_once,
    desk,
    scratch,
    told,
)


async def by_claude_code(it: Desk, task: str, *, folder: Path, home: Path, **environ: str) -> Ended:
    handle = it.open()
    return await claude_code(task, folder=folder, home=home, url=handle.base_url.removesuffix("/v1"), **environ)


async def by_codex(it: Desk, task: str, *, folder: Path, home: Path, words: tuple[str, ...] = ()) -> Ended:
    return await codex(task, folder=folder, home=home, url=it.open().base_url, words=words)


def said_by_claude_code(ended: Ended) -> str:
    assert ended.status == 0, ended.errors + ended.output[-2000:]
    assert ended.events[-1]["subtype"] == "success"
    return str(ended.events[-1]["result"])


def said_by_codex(ended: Ended) -> str:
    assert ended.status == 0, ended.errors + ended.output[-2000:]
    assert ended.events[-1]["type"] == "turn.completed"
    return [event["item"]["text"] for event in ended.events if event.get("item", {}).get("type") == "agent_message"][-1]


@pytest.mark.parametrize("disturbed", [False, True], ids=["calm", "disturbed"])
def test_claude_code_does_a_task_with_thinking_parallel_calls_and_an_agent_of_its_own(tmp_path: Path, disturbed: bool) -> None:
    """Six answers of the main agent and of the one that it asks. With pauses, aborts, deaths and ten versions of weights in the middle
    each request is answered as without."""

    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk(step_seconds=0.0025 if disturbed else 0.0) as it:
            ended = await _disturbed(it, by_claude_code(it, "TASK-CLAUDE: do it", folder=work, home=home), disturbed)
            assert said_by_claude_code(ended) == "Finished: a.txt says TWO."
            assert (work / "a.txt").read_text() == "one TWO three\n"
            record = it.close()
            assert record.num_turns == len(it.turns) == 7
            check_every_token_is_trained_once(record, it.turns)
            assert len(record.rows) == 2, told(record)
            check_answers_are_those_of_a_calm_run(it.engines, it.turns)

    asyncio.run(main())


@pytest.mark.parametrize("disturbed", [False, True], ids=["calm", "disturbed"])
def test_codex_does_a_task_with_thinking_and_parallel_calls(tmp_path: Path, disturbed: bool) -> None:
    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk(step_seconds=0.0025 if disturbed else 0.0) as it:
            ended = await _disturbed(it, by_codex(it, "TASK-CODEX: do it", folder=work, home=home), disturbed)
            assert said_by_codex(ended) == "Finished: a.txt says TWO."
            assert (work / "a.txt").read_text() == "one TWO three\n"
            record = it.close()
            assert record.num_turns == len(it.turns) == 4
            check_every_token_is_trained_once(record, it.turns)
            assert len(record.rows) == 1, told(record)
            check_answers_are_those_of_a_calm_run(it.engines, it.turns)

    asyncio.run(main())


OTHERS = {"TASK-QWEN": (qwen_code, 4, 1), "TASK-OPENCODE": (opencode, 5, 2), "TASK-GEMINI": (gemini_cli, 4, 3)}
"""Each with its turns and rows: opencode has the model give the task a name, in a conversation of its own; Gemini CLI forgets what the model
thought."""


@pytest.mark.parametrize("disturbed", [False, True], ids=["calm", "disturbed"])
@pytest.mark.parametrize("task", OTHERS)
def test_qwen_code_opencode_and_gemini_cli_do_a_task_with_thinking_and_parallel_calls(tmp_path: Path, task: str, disturbed: bool) -> None:
    agent, num_turns, num_rows = OTHERS[task]

    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk(step_seconds=0.0025 if disturbed else 0.0, sampling="run") as it:
            url = it.open().base_url
            running = agent(f"{task}: do it in {work}", folder=work, home=home, url=url.removesuffix("/v1") if agent is gemini_cli else url)
            ended = await _disturbed(it, running, disturbed)
            assert ended.status == 0 and "Finished: a.txt says TWO." in ended.output, ended.errors + ended.output[-2000:]
            assert (work / "a.txt").read_text() == "one TWO three\n"
            record = it.close()
            assert (record.num_turns, len(record.rows)) == (num_turns, num_rows), told(record)
            check_every_token_is_trained_once(record, it.turns)
            check_answers_are_those_of_a_calm_run(it.engines, it.turns)

    asyncio.run(main())


def test_aider_edits_until_its_test_is_content(tmp_path: Path) -> None:
    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk() as it:
            ended = await aider("TASK-AIDER: do it", folder=work, home=home, url=it.open().base_url, test="grep TWO a.txt")
            assert ended.status == 0 and (work / "a.txt").read_text() == "one TWO three\n", ended.errors + ended.output[-2000:]
            record = it.close()
            assert record.num_turns == len(it.turns) == 2, told(record)
            check_every_token_is_trained_once(record, it.turns)

    asyncio.run(main())


def test_codex_asks_an_agent_of_its_own_by_the_tools_of_a_namespace(tmp_path: Path) -> None:
    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk() as it:
            ended = await by_codex(it, "TASK-CODEX-ASKING: do it", folder=work, home=home)
            assert said_by_codex(ended) == "Finished: asked."
            assert any(event["item"].get("tool") == "spawn_agent" for event in ended.events if "item" in event), ended.output
            record = it.close()
            check_every_token_is_trained_once(record, it.turns)
            assert (record.num_turns, len(record.rows)) == (5, 2), told(record)
            assert "b.txt has two words." in told(record)

    asyncio.run(main())


async def _disturbed(it: Desk, work: object, disturbed: bool) -> Ended:
    """Waits for the end of the agent. Answers came from several versions then, and had been interrupted."""
    assert asyncio.iscoroutine(work)
    if not disturbed:
        return await work
    trouble = asyncio.create_task(it.disturb())
    try:
        ended = await work
    finally:
        trouble.cancel()
        with suppress(asyncio.CancelledError):
            await trouble
        await it.serving.control.resume()
    assert sum(turn.num_resumes for turn in it.turns) > 3
    assert it.serving.fleet.current_version() >= 10
    return ended


def test_claude_code_forgets_and_goes_on_from_a_summary(tmp_path: Path) -> None:
    """What was said before the summary is a row of its own; so is what comes after."""

    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk() as it:
            ended = await by_claude_code(it, "TASK-CLAUDE-LONG: do it", folder=work, home=home, CLAUDE_CODE_AUTO_COMPACT_WINDOW="100000")
            assert said_by_claude_code(ended) == "Finished after a summary."
            record = it.close()
            check_every_token_is_trained_once(record, it.turns)
            assert len(record.rows) >= 2

    asyncio.run(main())


def test_codex_forgets_and_goes_on_from_a_summary(tmp_path: Path) -> None:
    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk() as it:
            words = ("-c", "model_auto_compact_token_limit=40000")
            ended = await by_codex(it, "TASK-CODEX-LONG: do it", folder=work, home=home, words=words)
            assert said_by_codex(ended) == "Finished after a summary."
            record = it.close()
            check_every_token_is_trained_once(record, it.turns)
            assert len(record.rows) >= 2

    asyncio.run(main())
