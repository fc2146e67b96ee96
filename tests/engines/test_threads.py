"""How many threads a step takes."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from midflight.engines.embedded import threads
from midflight.engines.embedded.threads import StepThreads


@dataclass
class Machine:
    """With `most` threads; a step takes what `seconds` says of their number."""

    most: int
    seconds: Callable[[int], float]
    now: float = 0.0
    number: int = 0
    threads: StepThreads = field(default_factory=StepThreads)

    def set(self, number: int) -> None:
        self.number = number

    def monotonic(self) -> float:
        return self.now

    def steps(self, number: int, *, work: float = 1e8) -> list[int]:
        taken = []
        for _ in range(number):
            with self.threads.of(work):
                taken.append(self.number or self.most)
                self.now += self.seconds(taken[-1])
        return taken


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    def made(most: int, seconds: Callable[[int], float]) -> Machine:
        machine = Machine(most, seconds)
        monkeypatch.setattr(torch, "get_num_threads", lambda: most)
        monkeypatch.setattr(torch, "set_num_threads", machine.set)
        monkeypatch.setattr(threads, "time", machine)
        return machine

    return made


def test_the_first_steps_take_what_their_products_are_worth_and_later_there_are_all_threads_again(machine) -> None:
    of_three = machine(3, lambda _: 1.0)
    assert [of_three.steps(1, work=work) for work in (3.2e6 * 8, 3.2e6 * 32, 1e9)] == [[1], [2], [3]]
    assert of_three.number == 3


def test_steps_that_more_threads_make_slower_take_fewer_and_seldom_try_again(machine) -> None:
    busy = machine(2, lambda number: [0.0, 1.0, 9.0][number])
    assert busy.steps(50)[:32] == [2] * 32
    after = busy.steps(2000)
    assert 0 < after.count(2) <= 32


def test_steps_that_more_threads_make_faster_come_to_take_all(machine) -> None:
    wide = machine(6, lambda number: 1.0 / number)
    assert wide.steps(1, work=1e6) == [1]
    assert set(wide.steps(500, work=1e6)[-20:]) == {6}


def test_another_load_of_the_machine_is_found_in_time(machine) -> None:
    changing = machine(2, lambda number: 9.0 if number == 2 else 1.0)
    changing.steps(1500)
    changing.seconds = lambda number: 1.0 / number
    changing.steps(1100)
    assert set(changing.steps(20)) == {2}


def test_each_size_of_a_step_has_its_own_number(machine) -> None:
    sized = machine(2, lambda number: 1.0 / number)
    sized.steps(90, work=1e8)
    sized.seconds = lambda number: float(number)
    sized.steps(90, work=1e6)
    assert (sized.steps(1, work=1e8), sized.steps(1, work=1e6)) == ([2], [1])


def test_one_thread_is_left_as_it_is(machine) -> None:
    single = machine(1, lambda _: 1.0)
    single.steps(100)
    assert single.number == 0
