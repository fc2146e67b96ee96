"""A whole run whose tasks are chosen by their pass rates, and another process that goes on with it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from midflight.config.sources import CurriculumSection
from midflight.environments.tasks import TaskStream
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories.store import Store
from midflight.types import Reason, Task
from midflight.types.facts import Admitted, GroupClosed, TaskDrawn

from .site import Site, config

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CURRICULUM = CurriculumSection(priority="learnability", passes=2.0)
HELD_OUT = Task("held", "numbers", {"question": "n0"})


class Mixed:
    """Every third task always passes and every third never does; of the others every second rollout."""

    def __init__(self) -> None:
        self.tried = Counter[str]()

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(task.data["question"])}])
        self.tried[task.id] += 1
        return [3.0, -1.0, 2.0 * (self.tried[task.id] % 2)][int(task.id[1:]) % 3]


def drawn(stream: TaskStream, number: int) -> list[str]:
    ids: list[str] = []
    assert stream.curriculum is not None
    for _ in range(number):
        key = stream.draw()
        assert key is not None
        stream.curriculum.begun(key)
        ids.append(stream.task_of(key).id)
    return ids


def test_pass_rates_survive_the_process_and_the_next_draws_are_the_same(tmp_path: Path) -> None:
    async def main() -> Site:
        made = config(steps=12, groups=3, size=4, drop_zero_spread=True).model_copy(update={"curriculum": CURRICULUM})
        site = Site(made, tmp_path, agents=Mixed(), num_tasks=24, sdk=False)
        site.sources = [site.sources[0].__class__("numbers", 1.0, site.sources[0].training, heldout=(HELD_OUT,))]
        await site.run()
        return site

    site = run_virtual(main)
    site.check_groups()
    site.check_fates()
    assert site.ring is not None
    first = site.ring.system._stream
    again = TaskStream(site.sources, None, seed=site.config.run.seed, curriculum=CURRICULUM)
    assert first.curriculum is not None and again.curriculum is not None
    store = Store(tmp_path / "store.sqlite", run=None)
    again.curriculum.restore(store.scores(passes=CURRICULUM.passes))
    again.seek(*store.next_position())
    for unfinished in store.unfinished():
        again.curriculum.begun(unfinished.key)
    store.close()

    admitted = site.seen.of(Admitted)
    assert all(again.task_of(each.key) == each.task for each in admitted)
    assert again.curriculum.sizes == first.curriculum.sizes and again.curriculum.pass_rate == first.curriculum.pass_rate
    assert drawn(again, 40) == drawn(first, 40)
    assert len(admitted) == len(site.seen.of(TaskDrawn)) and all(each.task.id != "held" for each in admitted)

    alike = Counter(closed.alike for closed in site.seen.of(GroupClosed) if closed.reason is Reason.ZERO_SPREAD)
    assert alike.total() == site.books.dropped[Reason.ZERO_SPREAD] and set(alike) == {"passed", "failed"}
    taught = [int(task.task.id[1:]) % 3 == 2 for task in admitted]
    assert sum(taught[-30:]) > sum(taught[:30]), "more of them once their pass rates are known"
