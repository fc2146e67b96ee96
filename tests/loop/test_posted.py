"""A training run whose tasks are all posted: it waits for them, trains on each, and goes on after a crash with those left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from midflight.config.sources import SourceSection
from midflight.environments.posted import POSTED_EPOCH
from midflight.environments.tasks import posted_tasks
from midflight.errors import NotSupported
from midflight.run.rollout.standing import RolloutStanding
from midflight.testing.virtual_time import run_virtual
from midflight.types.facts import Admitted

from .site import Site, config


def posted_site(folder: Path, steps: int) -> Site:
    site = Site(config(steps=steps, groups=2, size=2), folder)
    site.sources, site.posted = [], posted_tasks([SourceSection(posted=True)], folder)
    return site


def questions(*numbers: int) -> list[dict[str, Any]]:
    return [{"question": f"q{number}"} for number in numbers]


def test_a_run_waits_for_posted_tasks_and_trains_on_all_of_them(tmp_path: Path) -> None:
    async def main() -> Site:
        site = posted_site(tmp_path, steps=3)

        async def posting() -> None:
            assert site.ring is not None
            for number in range(6):
                await asyncio.sleep(1000)
                assert site.ring.system.queue.waits["admission"].wait.for_whom == "tasks"
                site.ring.system.post(questions(number))
            await asyncio.Event().wait()

        await site.run(posting())
        return site

    site = run_virtual(main)
    site.check()
    assert [(fact.key.epoch, fact.key.index) for fact in site.seen.of(Admitted)] == [(POSTED_EPOCH, i) for i in range(6)]


def test_nothing_that_stands_still_for_want_of_posted_tasks_is_to_blame(tmp_path: Path) -> None:
    async def main() -> None:
        site = posted_site(tmp_path, steps=1)
        async with site.opened() as ring:
            standing = RolloutStanding(ring.serving)
            standing.watch(SimpleNamespace(host=None, runners=[], config=site.config), ring.system.queue)  # type: ignore[arg-type]

            async def looking() -> None:
                await asyncio.sleep(5000)
                (doing,) = [doing for doing in standing.now().doing if "tasks" in doing.what]
                assert doing.what == "admission waits for tasks (no task that was posted is left)" and doing.excused(doing.since + 1e8)
                ring.system.post(questions(0, 1))
                await asyncio.Event().wait()

            await ring.train(site.trainer, site.trainer, looking())

    run_virtual(main)


def test_posting_to_a_run_without_a_posted_source_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with Site(config(), tmp_path).opened() as ring:
            with pytest.raises(NotSupported, match=r"this run takes none.*posted = true"):
                ring.system.post(questions(0))

    run_virtual(main)
