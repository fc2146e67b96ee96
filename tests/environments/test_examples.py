"""The environments outside the package: the delayed one of the benchmark, and the example of one's own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest

from midflight.environments.agent_program import load_environment
from midflight.testing.virtual_time import run_virtual

from .fakes import FakeClient, task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path])


def test_the_delay_of_a_rollout_is_seeded_log_normal_and_bounded():
    from sides.delayed_environment import Delays

    delays = Delays(median=0.5, sigma=1.0)
    drawn = [delays.of(task(number), occurrence) for number in range(500) for occurrence in range(4)]
    assert drawn[:4] == [delays.of(task(0), occurrence) for occurrence in range(4)] and len(set(drawn)) > 1900
    assert median(drawn) == pytest.approx(0.5, rel=0.1) and max(drawn) <= 10.0
    assert sorted(drawn)[int(0.99 * len(drawn))] == pytest.approx(0.5 * 2.718281828**2.326, rel=0.25)


def test_a_task_overrules_the_delay_and_the_reward_is_that_of_the_plain_environment():
    from sides.delayed_environment import DelayedAnswer

    environment = DelayedAnswer()
    delayed = task(1, question="q", answer="olleh", delay_median_seconds=100.0, delay_sigma=0.0)

    async def main():
        reward = await environment(delayed, FakeClient("olleh", seconds=2.0))
        return reward, asyncio.get_running_loop().time()

    assert run_virtual(main) == (1.0, 102.0)


def test_the_delayed_environment_loads_by_its_entry():
    assert load_environment("sides.delayed_environment:answer")


@pytest.mark.parametrize(
    ("replies", "reward", "hint"),
    [
        (["olleh"], 1.0, None),
        (["olelh", "olleh "], 0.5, "No: 2 right, then wrong. Again:"),
        (["", "o"], 0.0, "No: 0 right, then wrong. Again:"),
    ],
)
def test_the_example_gives_half_for_a_second_try(replies: list[str], reward: float, hint: str | None):
    environment = load_environment("own_environment:spell_with_a_hint")
    left = list(replies)
    sent: list[list[dict]] = []

    async def create(*, model: str, messages: list[dict]):
        sent.append(list(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=left.pop(0)))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    assert run_virtual(lambda: environment(task(), client)) == reward  # type: ignore[arg-type]
    assert not left and (hint is None or sent[-1][-1]["content"] == hint)
    assert len(sent) == 1 or sent[-1][1] == {"role": "assistant", "content": replies[0]}
