"""A run whose trainer's core generates while the trainer waits, in real processes."""

from __future__ import annotations

import json
import re
import urllib.request
from contextlib import suppress
from pathlib import Path

from midflight.archive.ledger import ledger_of
from midflight.observe.timeline import RolloutTimed, read_timeline

from .processes import CONFIG, Command, steps
from .test_train import at_step, check_no_step_twice, check_nothing_left, check_store, interrupt

LENT = "engine1"
NUM_STEPS = 30


def is_lent(run: Path) -> bool:
    """Whether requests are there at this moment."""
    with suppress(OSError, ValueError, KeyError):
        url = json.loads((run / "endpoint.json").read_text())["url"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            found = re.search(rf'^midflight_engine_requests{{engine="{LENT}"}} (\S+)$', answer.read().decode(), re.M)
        return found is not None and float(found[1]) > 0
    return False


def placed_at(run: Path) -> set[str]:
    turns = [turn for line in read_timeline(run / "timeline.jsonl") if isinstance(line, RolloutTimed) for turn in line.turns]
    return {engine for turn in turns for engine, *_ in turn.placed}


def test_i8_a_trainer_killed_and_a_run_stopped_while_the_place_is_lent_lose_nothing_and_go_on(tmp_path: Path) -> None:
    """The lent engine answers while the trainer waits, every version reaches it, and no request fails with it."""
    # Answers that take longer than a step: the trainer waits, and the engine is lent, in almost every step.
    (tmp_path / "small.toml").write_text(
        CONFIG.replace("max_tokens = 6", "max_tokens = 120").replace("max_context = 64", "max_context = 192")
    )
    run = tmp_path / "run"
    sets = (f"run.steps={NUM_STEPS}", "engine.lend=true", "trainer.checkpoint_every=3")
    words = ("train", "small.toml", "--folder", run, *(word for each in sets for word in ("--set", each)))
    command = Command(*words, folder=tmp_path)
    try:
        at_step(command, run, 4)
        command.until(lambda: is_lent(run), "request at the lent engine")
        trainer = command.parts()["trainer"]
        command.kill("trainer")
        command.until(lambda: set(command.parts().get("trainer", ())) - set(trainer), "a new trainer")
        at_step(command, run, 10)
        parts = [pid for found in command.parts().values() for pid in found]
        command.until(lambda: is_lent(run), "request at the lent engine")
        assert interrupt(command, parts) < 5 and command.process.returncode == 130, command.said
        resumed = Command(*words, "--resume", folder=tmp_path)
        assert resumed.wait() == 0, resumed.said
    finally:
        command.end()
    check_no_step_twice(run, num_steps=NUM_STEPS)
    check_store(run)
    check_nothing_left(resumed, parts, run)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["failed_requests"], summary["failed_rollouts"]) == (NUM_STEPS, 0, 0)
    assert [line["step"] for line in steps(run)] == list(range(1, NUM_STEPS + 1))
    found = ledger_of(run)
    assert found.balanced, found.mistakes
    assert placed_at(run) == {"engine0", LENT}
