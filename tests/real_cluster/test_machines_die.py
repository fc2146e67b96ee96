"""One run over machines that are slowed down, told to end, powered off and cut off one after the other: engines, a rank, the gateway, the head.

The tests share one cluster and one run, and stand in the order in which things happen to it. Where each begins:

| machine | has |
|---|---|
| head | Ray's head and the launcher, no part of the run |
| first | gateway, agents, store; the first trainer rank |
| second | the second trainer rank, an engine |
| third | an engine |
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.processes import CONFIG

from .machines import BURST, missing
from .rays import Cluster, Launched, cluster, environ_of, member, until

pytestmark = [pytest.mark.skipif(missing() is not None, reason=missing() or ""), pytest.mark.timeout(1800)]
pytest.importorskip("ray", reason="Ray is not here (pip install 'midflight[ray]')")

STALENESS, GROUPS = 3, 2
MEGABITS = 0.5
"""A second, of a link that is slow."""
UNDER_WAY = 2
"""Versions that may have had a part of their bytes when a link becomes slow: one that is being brought, one that waits for its commit."""
DISK = "/tmp/store"
"""Of each machine its own: what lies there is lost with it."""
PATIENT = ("cluster.lost_seconds=60", "run.stall_seconds=120", "environment.rollout_seconds=600")
"""On a busy machine all is slow. That a machine is dead Ray says sooner."""
OPTIONS = (
    *("engine.count=2", "engine.threads=1", "trainer.ranks=2", "trainer.threads=1", "trainer.checkpoint_every=4", "run.restarts=20"),
    *("cluster.rollout={rollout=1}", "cluster.trainer={trainer=1}", "cluster.engine={engine=1}", f"rollout.max_staleness={STALENESS}"),
    *("gateway.drain_seconds=1", f"run.store_folder={DISK}"),
    *("environment.workers=0", 'environment.rewards=[{entry="tests.real_cluster.rewards:sum_of_letters"}]'),
    *PATIENT,
)


class Story:
    """The cluster, and the run on it."""

    def __init__(self, made: Cluster, folder: Path) -> None:
        self.cluster, self.config = made, folder / "small.toml"
        self.config.write_text(CONFIG)
        self.run: Launched | None = None

    def on(self, machine: str) -> list[str]:
        """The kinds of the run's parts that are there, in order."""
        module = "midflight.run.launcher.child "
        lines = self.cluster.members[machine].processes().values()
        return sorted(line.split(module)[1].split()[0] for line in lines if module in line)

    @property
    def running(self) -> Launched:
        assert self.run is not None, "the run did not come up"
        return self.run

    def until_serving(self, engine: str, machine: str) -> None:
        """Waits for that: until then another fault would be one of two at once."""
        address = self.cluster.members[machine].address

        def serves() -> bool:
            found = member(self.running.folder, engine)
            return found.get("state") == "serving" and f"//{address}:" in found["url"]

        self.running.until(serves, f"{engine} on the {machine} machine, with the current weights", 600)

    def staged(self, engine: str, *, number: int) -> list[float]:
        """How long each version took to come to an engine. Waits until there are so many of them."""

        def lines() -> list[float]:
            timed = [json.loads(line) for line in (self.running.folder / "timeline.jsonl").read_text().split("\n")[:-1]]
            return [line["stage_seconds"] for line in timed if (line["kind"], line.get("engine")) == ("commit", engine)]

        self.running.until(lambda: len(lines()) >= number, f"version {number} in {engine}", 600)
        return lines()

    def sound(self) -> None:
        """What holds at every moment: no request failed, and no trained token was older than the bound (I2)."""
        steps = self.running.steps()
        assert steps[-1]["totals"].get("failed_requests", 0) == 0, self.running.said[-6000:]
        assert max(line.get("staleness_max") or 0 for line in steps) <= STALENESS


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("shared")
    with cluster(folder) as made:
        told = Story(made, folder)
        made.add("head", "first", first={"rollout": 1, "trainer": 1})
        made.add("second", "third", second={"trainer": 1, "engine": 1}, third={"engine": 1})
        told.run = made.train("head", told.config, "run", "run.steps=100000", *OPTIONS)
        yield told


def test_a_run_has_its_parts_where_the_cluster_has_room_for_them_and_is_reached_there(story: Story) -> None:
    story.running.until_steps(2, seconds=600)
    assert story.on("head") == []
    assert story.on("first") == ["rollout", "trainer"]
    assert story.on("second") == ["engine", "trainer"]
    assert story.on("third") == ["engine"]
    endpoint = json.loads((story.running.folder / "endpoint.json").read_text())
    assert "warning: the gateway's machine can be reached from other machines" in story.running.said
    assert endpoint["url"].startswith(f"http://{story.cluster.members['first'].address}:")
    story.sound()


def test_a_run_goes_on_over_a_slow_link(story: Story) -> None:
    """An engine's machine with 0.5 Mbit/s gets every version, none faster than its bytes can come, and serves meanwhile."""
    run, third = story.running, story.cluster.members["third"]
    engine = member(run.folder, host=third.address)["name"]
    before = story.staged(engine, number=3)
    third.slow(MEGABITS)
    every = story.staged(engine, number=len(before) + UNDER_WAY + 4)
    found = member(run.folder, host=third.address)
    third.fast()
    assert found["state"] == "serving", found
    assert all(line["trainer"]["grad_norm"] > 0 for line in run.steps()), "a version that is as the one before has no bytes to come"
    seconds = ((run.folder / "start" / "model.safetensors").stat().st_size - BURST) * 8 / (MEGABITS * 1e6)
    during = every[len(before) + UNDER_WAY :]
    assert min(during) > 0.95 * seconds > 5 * min(before), (before, seconds, during)
    story.sound()


def test_an_engine_whose_machine_is_told_to_end_leaves_in_order_and_comes_back_on_another_one(story: Story) -> None:
    """Ray, which got SIGTERM, gives the machine nothing new and waits for what is there."""
    story.cluster.add("fourth", fourth={"engine": 1})
    run, third = story.running, story.cluster.members["third"]
    name = member(run.folder, host=third.address)["name"]
    story.cluster.end("third")
    story.until_serving(name, "fourth")
    assert f"{name} leaves its place at {third.address}, which is about to be taken away: " in run.said
    assert f"{name} has lost its seat" not in run.said
    until(lambda: story.cluster.ended("third"), "the end of Ray on the third machine", 120)
    assert story.on("third") == []
    story.sound()


def test_an_engine_on_a_machine_that_knows_no_ray_joins_and_leaves_under_load(story: Story) -> None:
    run, machine = story.running, story.cluster.net.boot()
    endpoint = json.loads((run.folder / "endpoint.json").read_text())
    command = [sys.executable, "-m", "midflight", "join", "--url", endpoint["url"], "--name", "guest"]
    environ = {**environ_of(machine), "MIDFLIGHT_CONTROL_TOKEN": endpoint["control_token"]}
    with (story.cluster.folder / "guest.log").open("wb") as log:
        guest = machine.start(*command, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def told(event: str) -> bool:
        return any((line.get("engine"), line.get("event")) == ("guest", event) for line in run.journal())

    run.until(lambda: told("joined"), "the guest in the run", 900)
    run.until_steps(3)
    assert guest.poll() is None, (story.cluster.folder / "guest.log").read_text()
    os.kill(next(pid for pid, line in machine.processes().items() if "midflight join" in line), signal.SIGTERM)
    run.until(lambda: told("left"), "the guest out of the run", 900)
    guest.wait(300)
    run.until_steps(3)
    story.sound()


def test_an_engine_whose_machine_loses_power_comes_back_on_another_one(story: Story) -> None:
    story.cluster.add("fifth", fifth={"engine": 1})
    fourth = story.cluster.members["fourth"]
    name = member(story.running.folder, host=fourth.address)["name"]
    fourth.power_off()
    story.running.until_steps(3)
    story.until_serving(name, "fifth")
    story.running.until_steps(3)
    story.sound()


def test_a_rank_whose_machine_is_cut_off_goes_back_to_the_checkpoint_on_another_one(story: Story) -> None:
    """An engine is lost with it. Gateway and the other engine stay."""
    story.cluster.add("sixth", sixth={"trainer": 1, "engine": 1})
    gateway = next(pid for pid, line in story.cluster.members["first"].processes().items() if "child rollout" in line)
    name = member(story.running.folder, host=story.cluster.members["second"].address)["name"]
    story.cluster.members["second"].unplug()
    story.running.until(lambda: "trainer" in story.on("sixth"), "a rank on the sixth machine")
    story.until_serving(name, "sixth")
    story.running.until_steps(5)
    assert "child rollout" in story.cluster.members["first"].processes().get(gateway, ""), "the gateway stayed"
    story.sound()


def test_a_gateway_whose_machine_loses_power_goes_on_elsewhere_with_the_store_of_the_checkpoint(story: Story) -> None:
    """The first rank is lost with it, and the store, which lay on its disk."""
    run = story.running
    story.cluster.add("seventh", seventh={"rollout": 1, "trainer": 1})
    assert not list(run.folder.glob("store.sqlite*")), "the store is on the disk of the gateway's machine alone"
    story.cluster.members["first"].power_off()
    run.until(lambda: story.on("seventh") == ["rollout", "trainer"], "gateway and rank on the seventh machine")
    run.until_steps(5)
    assert "rollouts since then are generated again" in run.said and f"goes on from {run.folder}/checkpoints/" in run.said
    story.sound()
    books_balance(story, "seventh")


def test_a_run_whose_head_loses_power_ends_everywhere_and_goes_on_in_another_cluster_to_its_end(story: Story) -> None:
    """The head's loss is the launcher's: nobody is left who would start anything again."""
    members = dict(story.cluster.members)
    members.pop("head").power_off()
    left = [name for name, machine in members.items() if machine.lives]
    until(lambda: not any(story.on(name) for name in left), "the end of all parts", 300)
    for machine in members.values():
        machine.power_off()

    story.cluster.members.clear()
    story.cluster.add("head", "first", first={"rollout": 1, "trainer": 2, "engine": 2})
    steps = story.running.steps()[-1]["step"] + 6
    story.run = story.cluster.train("head", story.config, "run", "--resume", f"run.steps={steps}", *OPTIONS)
    story.running.until(lambda: story.running.process.poll() is not None, "the end of the run", 900)
    assert story.running.process.returncode == 0, story.running.said[-6000:]
    assert story.running.said.count("rollouts since then are generated again") == 2, "the second time for the new cluster"
    story.sound()
    summary = json.loads((story.running.folder / "summary.json").read_text())
    assert (summary["steps"], summary["failed_requests"]) == (steps, 0) and summary["max_token_staleness"] <= STALENESS
    assert [line["step"] for line in story.running.steps()] == list(range(1, steps + 1)), "every step is in the journal once (I8)"
    books = books_balance(story, "first")
    assert (books["trained"], books["leased"]) == (steps * GROUPS, 0), "as many groups as the steps took (I8)"


BOOKS = """
import json, sqlite3, sys
from contextlib import closing
from pathlib import Path
from midflight.archive.ledger import ledger_of
found = ledger_of(Path(sys.argv[1]))
(store,) = Path(sys.argv[2]).glob("midflight-*.sqlite")
with closing(sqlite3.connect(store)) as opened:
    sound = opened.execute("PRAGMA integrity_check").fetchone()[0]
print(json.dumps({"mistakes": found.mistakes, "sound": sound, "trained": found.accounts.trained, "leased": found.accounts.leased}))
"""


def books_balance(story: Story, machine: str) -> dict[str, Any]:
    """Every token is in one place (I3), says the store on that machine's disk; the run may go on meanwhile."""
    asked = (sys.executable, "-c", BOOKS, str(story.running.folder), DISK)
    said: dict[str, Any] = json.loads(story.cluster.members[machine].run(*asked, env=story.cluster.environ).stdout)
    assert (said["sound"], said["mistakes"]) == ("ok", []), said
    return said
