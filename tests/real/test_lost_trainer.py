"""Ranks of a trainer are killed, and engine, gateway, agents and an open stream stay; a machine is lost with its disk, and another goes on from
the pair of checkpoint and store (I1, I3, I8)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import openai

from midflight.archive.ledger import ledger_of
from midflight.archive.prove.proof import prove
from midflight.archive.store_reader import copy_in_words
from midflight.trajectories.pairs import newest_copy

from .processes import CONFIG, Command, alive, gone, segments, steps
from .test_train import check_no_step_twice, check_store

NUM_STEPS, NUM_TOKENS = 60, 800
STAY = ("engine", "rollout")


class Stream:
    """An answer of so many tokens, as it comes."""

    def __init__(self, num_tokens: int = NUM_TOKENS) -> None:
        self.num_tokens = num_tokens
        self.num_chunks, self.ended = 0, ""

    async def read(self, client: openai.AsyncOpenAI) -> None:
        extra = {"min_tokens": self.num_tokens, "ignore_eos": True}
        stream = await client.completions.create(model="policy", prompt="go", max_tokens=self.num_tokens, stream=True, extra_body=extra)
        async for chunk in stream:
            self.num_chunks += 1
            self.ended = chunk.choices[0].finish_reason or "" if chunk.choices else self.ended


def test_i8_a_killed_rank_of_the_trainer_costs_steps_and_no_request_engine_or_gateway(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG.replace("max_context = 64", "max_context = 4096"))
    run = tmp_path / "run"
    sets = (f"run.steps={NUM_STEPS}", "trainer.ranks=2", "trainer.checkpoint_every=3", "trainer.micro_batch_tokens=4096")
    command = Command("train", "small.toml", "--folder", "run", *(w for s in sets for w in ("--set", s)), folder=tmp_path)
    try:
        command.until(lambda: len(steps(run)) >= 4, "step 4")
        asyncio.run(asyncio.wait_for(killed_in_mid_stream(command, run), 120))
        before = command.parts()
        killed = min(before["trainer"])
        command.kill("trainer", 0)
        again(command, run, above=last_of(before["trainer"], command, run))
        assert not alive(killed) and {part: command.parts()[part] for part in STAY} == {part: before[part] for part in STAY}
        everything = [pid for pids in command.parts().values() for pid in pids]
        assert command.wait(90) == 0, command.said
    finally:
        command.end()
    assert command.said.count("The trainer goes on from its last checkpoint; engines, gateway and agents stay.") == 2
    assert "The run goes on from" not in command.said and not [pid for pid in everything if alive(pid)] and not segments(run)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["failed_requests"], summary["failed_rollouts"], summary["steps"]) == (0, 0, NUM_STEPS)
    assert summary["max_token_staleness"] <= 4
    check_no_step_twice(run, num_steps=NUM_STEPS)
    check_store(run)
    found = ledger_of(run)
    assert found.balanced and found.accounts.trained == 2 * NUM_STEPS, found.mistakes
    assert prove(run).mistakes == [] and prove(run).num_steps == NUM_STEPS


def test_i8_a_run_whose_machine_is_lost_with_the_store_goes_on_from_the_last_pair(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(CONFIG)
    run, disk = tmp_path / "run", tmp_path / "disk"
    sets = ("run.steps=16", "trainer.checkpoint_every=3", f"run.store_folder={disk}")
    words = ("train", "small.toml", "--folder", "run", *(w for s in sets for w in ("--set", s)))
    command = Command(*words, folder=tmp_path)
    try:
        command.until(lambda: len(steps(run)) >= 8, "step 8")
        everything = [pid for pids in command.parts().values() for pid in pids]
        os.kill(command.process.pid, signal.SIGSTOP)  # so that it starts nothing while its parts die
        for pid in (*everything, command.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert gone([*everything, command.process.pid], seconds=5)
    finally:
        command.end()
    assert list(disk.glob("*.sqlite")) and not (run / "store.sqlite").exists(), "the store is on the disk alone"
    disk.rename(tmp_path / "lost")
    copy = newest_copy(run)
    assert copy is not None and copy_in_words(run) is not None and ledger_of(run).balanced, "elsewhere the copy is read"
    elsewhere = prove(run)
    assert elsewhere.mistakes == [] and copy.version <= elsewhere.num_steps, elsewhere
    if elsewhere.num_steps < len(steps(run)):
        assert "steps are newer than the copy of the store" in elsewhere.notes[-1]
    resumed = Command(*words, "--resume", folder=tmp_path)
    try:
        assert resumed.wait(120) == 0, resumed.said
    finally:
        resumed.end()
    assert f"a copy of version {copy.version}: rollouts since then are generated again" in resumed.said
    assert [line["step"] for line in steps(run)] == list(range(1, 17))
    found = ledger_of(run)
    assert found.balanced and found.accounts.trained == 32 and copy_in_words(run) is None, found.mistakes
    assert prove(run).mistakes == [] and prove(run).num_steps == 16
    assert all(list(folder.glob("store-*.increment")) for folder in (run / "checkpoints").glob("version-*")), (
        "kept as long as its checkpoint"
    )


def last_of(ranks: list[int], command: Command, run: Path) -> int:
    """The last version of ranks that are about to end."""
    command.until(lambda: not {*ranks} & {*command.parts().get("trainer", ())}, "end of all ranks")
    return int(steps(run)[-1]["version"])


def again(command: Command, run: Path, *, above: int) -> None:
    """Waits for a step of the next trainer: its versions are above all that there were."""
    command.until(lambda: any(line["version"] > above + 1 for line in steps(run)), "step of the next trainer")


async def killed_in_mid_stream(command: Command, run: Path) -> None:
    endpoint = json.loads((run / "endpoint.json").read_text())
    headers = {"Authorization": f"Bearer {endpoint['control_token']}"}
    async with httpx2.AsyncClient(base_url=endpoint["url"], headers=headers, timeout=120) as http:
        session: dict[str, Any] = (await http.post("/midflight/v1/sessions", json={})).json()
        stream = Stream()
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as client, asyncio.TaskGroup() as group:
            group.create_task(stream.read(client))
            while not stream.num_chunks:
                await asyncio.sleep(0.01)
            before = command.parts()
            command.kill("trainer", 1)
            at_kill = stream.num_chunks
            assert not stream.ended
            made = await asyncio.to_thread(last_of, before["trainer"], command, run)
            await asyncio.to_thread(again, command, run, above=made)
            after = command.parts()
        assert stream.ended == "length" and stream.num_chunks > at_kill
        record = (await http.post(f"/midflight/v1/sessions/{session['session_id']}/end", json={})).json()
        assert record["failed_requests"] == 0
    assert {part: after[part] for part in STAY} == {part: before[part] for part in STAY}
    assert len(after["trainer"]) == 2 and not set(after["trainer"]) & set(before["trainer"]), "both ranks are new"
