"""I7: weights from whoever has them, between processes: a source that is killed in mid-transfer, stops or lies costs nobody a version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .pulling import Puller

MEGABYTES = 8


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


class Site:
    """A trainer that has published, and engines on machines by name: those of one name share its memory."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.manifest = str(folder / "manifest.json")
        self.trainer = self._started("give", "127.0.0.1", self.manifest, str(MEGABYTES))
        assert self.trainer.said() == "ready"

    def engine(self, machine: str) -> Puller:
        return self._started("take", self.manifest, str(self._folder / machine))

    def told(self, process: Puller, word: str) -> None:
        process.tell(word)
        while (said := process.said()) != f"told {word}":
            assert said, "it ended"

    def _started(self, *words: str) -> Puller:
        return self._stack.enter_context(Puller(*words))


def test_a_source_that_lies_or_is_killed_in_mid_transfer_and_then_the_trainer_leave_whole_versions(site: Site) -> None:
    first = site.engine("a")
    whole = first.said()
    assert whole["num_bytes"] == MEGABYTES * 2**20
    beside = site.engine("a")
    assert beside.said() == whole | {"num_bytes": 0, "seconds": pytest.approx(0, abs=60)}, "one copy a machine"

    site.told(site.trainer, "nothing")
    site.told(first, "lies")
    second = site.engine("b")
    assert first.said() == "lies", "who has it is asked"
    site.told(site.trainer, "everything")
    lied_to = second.said()
    assert lied_to["sha256"] == whole["sha256"] and lied_to["num_bytes"] > whole["num_bytes"], "a bucket came twice"
    assert sum(lied_to["blamed"].values()) == 1
    second.kill()

    site.told(site.trainer, "nothing")
    site.told(first, "hangs")
    third = site.engine("c")
    assert first.said() == "hangs"
    site.told(site.trainer, "everything")
    first.kill()
    assert third.said()["sha256"] == whole["sha256"]

    site.told(site.trainer, "nothing")
    site.told(third, "hangs")
    fourth = site.engine("d")  # which the trainer tells of the third, and of those that are dead
    assert third.said() == "hangs"
    site.trainer.kill()
    third.tell("honest")
    assert fourth.said()["sha256"] == whole["sha256"]
    late = site.engine("a").said()
    assert late["sha256"] == whole["sha256"] and late["num_bytes"] == 0, "its machine still has a copy: no source is needed"


def test_an_engine_killed_while_it_fetches_for_its_machine_is_followed_by_the_next_which_goes_on(site: Site) -> None:
    site.told(site.trainer, "hangs")
    fetching = site.engine("a")
    assert [site.trainer.said(), site.trainer.said()] == ["hangs", "hangs"], "two buckets are on their way"
    waiting = site.engine("a")
    fetching.kill()
    assert site.trainer.said() == "hangs", "the next asks for itself"
    site.trainer.kill()
    assert "no source is left" in waiting.said()["error"] and not list((Path(site.manifest).parent / "a").iterdir())
