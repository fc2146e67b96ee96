"""Weights from whoever has them, over machines of their own: one that loses power in mid-transfer, and the trainer's, cost nobody a version."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.real.pulling import Puller

from .machines import Machine, missing, network

pytestmark = [pytest.mark.skipif(missing() is not None, reason=missing() or ""), pytest.mark.timeout(300)]
MEGABYTES = 8
SHARED = "/dev/shm/engines"


def told(process: Puller, word: str) -> None:
    process.tell(word)
    while (said := process.said()) != f"told {word}":
        assert said, "it ended"


def test_a_version_reaches_every_machine_whole_though_its_sources_lose_power_one_after_the_other(tmp_path: Path) -> None:
    manifest = str(tmp_path / "manifest.json")
    with network(tmp_path) as made, ExitStack() as stack:

        def started(machine: Machine, *words: str) -> Puller:
            return stack.enter_context(Puller(*words, before=machine.command()))

        trainers, one, two, three = (made.boot() for _ in range(4))
        trainer = started(trainers, "give", trainers.address, manifest, str(MEGABYTES))
        assert trainer.said() == "ready"
        first, beside = started(one, "take", manifest, SHARED), started(one, "take", manifest, SHARED)
        whole = first.said()
        both = [whole, beside.said()]
        assert sorted(said["num_bytes"] for said in both) == [0, MEGABYTES * 2**20], "over the wire once for a machine"
        source = first if whole["num_bytes"] else beside

        told(trainer, "nothing")
        told(source, "hangs")
        second = started(two, "take", manifest, SHARED)
        assert source.said() == "hangs", "in mid-transfer"
        one.power_off()
        told(trainer, "everything")
        assert second.said()["sha256"] == whole["sha256"]

        told(trainer, "nothing")
        told(second, "hangs")
        third = started(three, "take", manifest, SHARED)
        assert second.said() == "hangs"
        trainers.power_off()
        second.tell("honest")
        assert third.said()["sha256"] == whole["sha256"]
