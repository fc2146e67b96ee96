"""Two gateways of a run, each on a machine of its own: one is killed, unplugged and moved. No token is too old, and no group trained twice.

The tests share one cluster and one run, and stand in the order in which things happen to it. Where each begins:

| machine | has |
|---|---|
| head | Ray's head and the launcher, the trainer, the engine |
| first | the first gateway, its agents, its store; or the second |
| second | the other gateway |
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.processes import CONFIG

from .machines import missing
from .rays import Cluster, Launched, cluster

pytestmark = [pytest.mark.skipif(missing() is not None, reason=missing() or ""), pytest.mark.timeout(1800)]
pytest.importorskip("ray", reason="Ray is not here (pip install 'midflight[ray]')")

STALENESS = 3
DISK = "/tmp/store"
"""Of each machine its own: what lies there is lost with it."""
OPTIONS = (
    *("gateway.shards=2", "engine.threads=1", "trainer.threads=1", "trainer.checkpoint_every=4", "run.restarts=20"),
    *("cluster.rollout={rollout=1}", "cluster.trainer={trainer=1}", "cluster.engine={engine=1}", f"rollout.max_staleness={STALENESS}"),
    *(f"run.store_folder={DISK}", "environment.workers=0"),
    'environment.rewards=[{entry="tests.real_cluster.rewards:sum_of_letters"}]',
    *("cluster.lost_seconds=60", "run.stall_seconds=120", "environment.rollout_seconds=600"),
)
OTHERS_STAY = "It goes on from its store; trainer, engines and the other gateways stay."
TRAINED = """
import json, sqlite3, sys
from contextlib import closing
from pathlib import Path
from midflight.trajectories.pairs import store_path
with closing(sqlite3.connect(store_path(Path(sys.argv[1]), Path(sys.argv[2])))) as store:
    sound = store.execute("PRAGMA integrity_check").fetchone()[0]
    print(json.dumps([sound, store.execute("SELECT epoch, position FROM groups WHERE state = 'trained'").fetchall()]))
"""


class Story:
    """The cluster, and the run on it."""

    def __init__(self, made: Cluster, run: Launched) -> None:
        self.cluster, self.run = made, run

    def processes(self, machine: str, part: str) -> list[int]:
        """The run's parts of this kind that are there."""
        lines = self.cluster.members[machine].processes().items()
        return [pid for pid, line in lines if f"midflight.run.launcher.child {part}" in line]

    def folder_at(self, machine: str) -> Path | None:
        """The folder of the gateway on this machine, as its address says."""
        for folder in (self.run.folder, self.run.folder / "shards" / "1"):
            try:
                url = json.loads((folder / "endpoint.json").read_text())["url"]
            except (OSError, ValueError):
                continue
            if url.startswith(f"http://{self.cluster.members[machine].address}:"):
                return folder
        return None

    def until_at(self, machine: str) -> None:
        self.run.until(lambda: self.processes(machine, "rollout") and self.folder_at(machine), f"a gateway on the {machine} machine", 600)

    def sound(self) -> None:
        """What holds at every moment: no request failed, and no trained token was older than the bound (I2)."""
        for folder in (self.run.folder, self.run.folder / "shards" / "1"):
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]]
            steps = [line for line in lines if line.get("kind") == "step"]
            assert steps and steps[-1]["totals"].get("failed_requests", 0) == 0, self.run.said[-6000:]
            assert max(line.get("staleness_max") or 0 for line in steps) <= STALENESS


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("shared")
    config = folder / "small.toml"
    config.write_text(CONFIG)
    with cluster(folder) as made:
        made.add("head", "first", "second", head={"trainer": 1, "engine": 1}, first={"rollout": 1}, second={"rollout": 1})
        yield Story(made, made.train("head", config, "run", "run.steps=100000", *OPTIONS))


def test_each_gateway_has_a_seat_and_an_address_of_its_own(story: Story) -> None:
    story.run.until_steps(5, seconds=600)
    for machine in ("first", "second"):
        assert len(story.processes(machine, "rollout")) == 1
    assert {story.folder_at("first"), story.folder_at("second")} == {story.run.folder, story.run.folder / "shards" / "1"}
    assert not list(story.run.folder.rglob("store.sqlite*")), "each store is on the disk of its gateway's machine alone"
    story.sound()


@pytest.mark.parametrize("machine", ["second", "first"])
def test_a_gateway_that_is_killed_goes_on_from_its_store_in_its_seat(story: Story, machine: str) -> None:
    run = story.run
    stayed = [story.processes("head", part) for part in ("trainer", "engine")]
    (killed,) = story.processes(machine, "rollout")
    before = run.said.count(OTHERS_STAY)
    os.kill(killed, signal.SIGKILL)
    run.until(lambda: run.said.count(OTHERS_STAY) > before, "word of its restart")
    run.until_steps(5)
    assert story.processes(machine, "rollout") not in ([], [killed])
    assert [story.processes("head", part) for part in ("trainer", "engine")] == stayed
    assert "The run goes on from" not in run.said
    story.sound()


def test_a_gateway_whose_machine_is_cut_off_goes_on_elsewhere_from_the_copy_of_the_checkpoint(story: Story) -> None:
    run = story.run
    story.cluster.add("third", third={"rollout": 1})
    story.cluster.members["second"].unplug()
    story.until_at("third")
    run.until_steps(5)
    copy = f"goes on from {run.folder}/checkpoints/"
    assert run.said.count("The run goes on from its last checkpoint") == 1
    assert run.said.count(copy) == 1 and "rollouts since then are generated again" in run.said, "the other store was there"
    story.sound()


def test_a_gateway_whose_machine_is_told_to_end_moves_to_another_one(story: Story) -> None:
    run = story.run
    story.cluster.add("fourth", fourth={"rollout": 1})
    story.cluster.end("first")
    story.until_at("fourth")
    run.until_steps(5)
    assert run.said.count("The run goes on from its last checkpoint") == 2
    story.sound()


def test_i8_at_its_end_each_group_was_trained_once(story: Story) -> None:
    """The run is ended where its gateways came to, and resumed: each has its seat, and its store, on either of the two machines."""
    run = story.run
    head = story.cluster.members["head"].processes().items()
    os.kill(next(pid for pid, line in head if "-m midflight train" in line and "nsenter" not in line), signal.SIGTERM)
    run.process.wait(300)
    goal = run.steps()[-1]["step"] + 6
    story.run = run = story.cluster.train("head", run.folder.parent / "small.toml", "run", "--resume", f"run.steps={goal}", *OPTIONS)
    run.until(lambda: run.process.poll() is not None, "the end of the run", 900)
    assert run.process.returncode == 0, run.said[-6000:]
    story.sound()
    assert [line["step"] for line in run.steps()] == list(range(1, goal + 1)), "every step is in the journal once"
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["steps"], summary["failed_requests"]) == (goal, 0) and summary["max_token_staleness"] <= STALENESS
    for shard, folder in enumerate((run.folder, run.folder / "shards" / "1")):
        trained = trained_on_some_machine(story, folder)
        assert len(trained) == len({tuple(key) for key in trained}) == goal
        assert all((200 * epoch + position) % 2 == shard for epoch, position in trained)


def trained_on_some_machine(story: Story, folder: Path) -> list[list[int]]:
    """The groups that the gateway's store says are trained, from the disk of the machine that had it last."""
    found: list[Any] = []
    for name in ("third", "fourth"):
        machine = story.cluster.members[name]
        asked = machine.run(sys.executable, "-c", TRAINED, str(folder), DISK, env=story.cluster.environ, check=False)
        if asked.returncode == 0:
            found.append(json.loads(asked.stdout))
    assert found and all(sound == "ok" for sound, _ in found), found
    return max((trained for _, trained in found), key=len)
