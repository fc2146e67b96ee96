"""Two gateways of a run, each killed once: agents of the other notice nothing, and it goes on from its own store (I1 to I3, I8)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import httpx2
import openai
import pytest
from tests.ops.nginx import MISSING, NGINX, one_address

from midflight.archive.ledger import ledger_of
from midflight.archive.prove.proof import prove
from midflight.trajectories.pairs import store_path

from .processes import CONFIG, Command, alive, segments, steps
from .test_lost_trainer import Stream

pytestmark = pytest.mark.skipif(NGINX is None, reason=MISSING)
NUM_STEPS = 70


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the folder", "store_folder"])
def test_i8_a_killed_gateway_costs_its_own_agents_a_restart_and_nobody_else_anything(tmp_path: Path, elsewhere: bool) -> None:
    (tmp_path / "small.toml").write_text(CONFIG.replace("max_context = 64", "max_context = 4096"))
    run = tmp_path / "run"
    sets = ("gateway.shards=2", f"run.steps={NUM_STEPS}", "trainer.checkpoint_every=3", "trainer.micro_batch_tokens=4096")
    disk = tmp_path / "disk" if elsewhere else None
    if disk is not None:
        sets += (f"run.store_folder={disk}",)
    command = Command("train", "small.toml", "--folder", "run", *(w for s in sets for w in ("--set", s)), folder=tmp_path)
    try:
        command.until(lambda: len(steps(run)) >= 3, "step 3")
        stayed = [command.parts()[part] for part in ("engine", "trainer")]
        for killed, other in ((run / "shards" / "1", run), (run, run / "shards" / "1")):
            with one_address(run, tmp_path / f"nginx-{killed.name}") as url:
                asyncio.run(asyncio.wait_for(killed_beside(command, run, killed, other, url), 120))
        assert [command.parts()[part] for part in ("engine", "trainer")] == stayed
        everything = [pid for pids in command.parts().values() for pid in pids]
        assert command.wait(120) == 0, command.said
    finally:
        command.end()
    assert command.said.count("It goes on from its store; trainer, engines and the other gateways stay.") == 2
    assert "The run goes on from" not in command.said and not [pid for pid in everything if alive(pid)] and not segments(run)
    assert (
        [line["version"] for line in steps(run)] == [line["version"] for line in steps(run / "shards" / "1")] == [*range(1, NUM_STEPS + 1)]
    )
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["failed_requests"], summary["failed_rollouts"], summary["steps"]) == (0, 0, NUM_STEPS)
    assert summary["max_token_staleness"] <= 4
    if disk is not None:
        newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
        copies = sorted(str(path.relative_to(newest)) for path in newest.rglob("store-*"))
        version = int(newest.name.removeprefix("version-"))
        assert copies == [f"shards/1/store-{version}.increment", f"store-{version}.increment"], "a checkpoint has a copy of each store"
    found = ledger_of(run)
    assert found.balanced and found.accounts.trained == 2 * NUM_STEPS, found.mistakes
    assert prove(run).mistakes == [] and prove(run).num_steps == NUM_STEPS
    for shard, folder in enumerate((run, run / "shards" / "1")):
        with closing(sqlite3.connect(store_path(folder, disk))) as file:
            trained = file.execute("SELECT epoch, position FROM groups WHERE state = 'trained'").fetchall()
        assert len(trained) == len(set(trained)) == NUM_STEPS
        assert all((200 * epoch + position) % 2 == shard for epoch, position in trained)
    if disk is not None:
        disk.rename(tmp_path / "lost")
        assert prove(run).mistakes == [], "elsewhere the copies are read"


async def killed_beside(command: Command, run: Path, killed: Path, other: Path, url: str) -> None:
    """An agent of the `other` gateway is in the midst of an answer when the one dies, and when it is there again."""
    headers = {"Authorization": f"Bearer {json.loads((other / 'endpoint.json').read_text())['control_token']}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=120) as http:
        sessions = [(await http.post("/midflight/v1/sessions", json={})).json() for _ in range(2)]
        by_gateway = {one["session_id"][:6]: one for one in sessions}
        assert by_gateway.keys() == {"mf-s0-", "mf-s1-"}, "opened at each in turn"
        session = by_gateway["mf-s0-" if other == run else "mf-s1-"]
        stream = Stream(300)
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session["api_key"], max_retries=0) as client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(stream.read(client))
            while not stream.num_chunks:
                await asyncio.sleep(0.01)
            before = command.said.count("is started again")
            command.kill("rollout", 0 if killed == run else 1)
            at_kill, made = stream.num_chunks, len(steps(run))
            assert not stream.ended
            await asyncio.to_thread(command.until, lambda: command.said.count("is started again") > before, "word of its restart")
        assert stream.ended == "length" and stream.num_chunks > at_kill
        await asyncio.to_thread(command.until, lambda: len(steps(run)) > made + 2, "a step that it has a part in")
        record = (await http.post(f"/midflight/v1/sessions/{session['session_id']}/end", json={})).json()
        assert record["failed_requests"] == 0
