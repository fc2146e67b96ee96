"""One scripted model works in every coding agent as it is shipped: it finds the tool that runs commands, and does a whole small task in it.

Answers come from several versions, and are interrupted. Where an agent samples as the run does, every token is trained; where it does not, the
heads of its answers name the field, and `gateway.sampling = "run"` trains it all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.coding_agents.clis import Ended, claude_code, codex, copilot, gemini_cli, goose, opencode, openhands, qwen_code
from tests.coding_agents.desk import check_every_token_is_trained_once, desk, scratch, told
from tests.shares import check_trained_share

from midflight.testing.commands import ScriptedCommands

RULE = ScriptedCommands(
    "TASK-SHELL",
    ("cat a.txt b.txt", "sed s/two/TWO/ a.txt > new.txt && mv new.txt a.txt", "cat a.txt"),
    end="Finished: a.txt says TWO.",
    aside="A task",
)
"""Qwen Code refuses `sed -i` on a file that its own tool has not read."""
Running = Callable[..., Awaitable[Ended]]
AGENTS: dict[str, tuple[Running, bool]] = {
    "claude code": (claude_code, False),
    "codex": (codex, True),
    "qwen code": (qwen_code, True),
    "opencode": (opencode, True),
    "copilot": (copilot, True),
    "goose": (goose, True),
    "gemini cli": (gemini_cli, False),
    "openhands": (openhands, True),
}
"""Each with whether its base URL ends in `/v1`."""
SETS_ITS_OWN = {"copilot", "gemini cli"}
"""Those that send a sampling of their own."""


@pytest.mark.parametrize("sampling", ["request", "run"])
@pytest.mark.parametrize("name", AGENTS)
def test_a_shipped_agent_does_a_task_over_versions_and_its_share_is_said(tmp_path: Path, name: str, sampling: str) -> None:
    agent, with_v1 = AGENTS[name]

    async def main() -> None:
        work, home = scratch(tmp_path)
        async with desk(RULE, step_seconds=0.0025, sampling=sampling) as it:
            url = it.open().base_url
            trouble = asyncio.create_task(it.disturb())
            try:
                ended = await agent("TASK-SHELL: do it", folder=work, home=home, url=url if with_v1 else url.removesuffix("/v1"))
            finally:
                trouble.cancel()
                with suppress(asyncio.CancelledError):
                    await trouble
                await it.serving.control.resume()
            assert ended.status == 0 and "Finished: a.txt says TWO." in ended.output, ended.errors + ended.output[-2000:]
            assert (work / "a.txt").read_text() == "one TWO three\n"
            record = it.close()
            received = sum(len(turn.output_ids) for turn in it.turns)
            print(f"{name}, {sampling}: {record.shares}, masked by {dict(record.masked_by)}, replaced {dict(record.replaced)}")
            check_trained_share(received, record.masked, named=record.masked_by)
            assert it.heads.fields == set(record.masked_by)
            assert bool(record.masked_by) == (name in SETS_ITS_OWN and sampling == "request"), told(record)
            if not record.masked_by:
                check_every_token_is_trained_once(record, it.turns)

    asyncio.run(main())
