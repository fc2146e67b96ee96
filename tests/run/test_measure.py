"""What is measured of a model before a configuration is written for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from midflight.cli.project import word_problems
from midflight.config import Config, load_config
from midflight.config.sections import ModelSection
from midflight.errors import ConfigError
from midflight.run.launcher import measure
from midflight.run.launcher.measure import Measurement
from midflight.run.launcher.measurements import WIDTHS, ModelMeasurements
from midflight.run.launcher.trial import TrialReport
from midflight.run.trainer.trainer_process import first_model


@pytest.fixture
def trial() -> Iterator[TrialReport]:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    yield TrialReport(descriptor)
    os.close(descriptor)


def config_of(folder: Path, rows: list[dict[str, object]], *, max_context: int = 256) -> Config:
    """A model of random weights, and rows as tasks."""
    sizes = ModelSection(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, max_context=max_context)
    first_model(sizes, folder / "model", seed=0)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(folder / "tasks.jsonl"), "answer": "answer"}]
    return load_config(None, table={"model": {"path": str(folder / "model")}, "environment": {"sources": sources}})


def test_answers_go_on_until_most_have_ended_or_the_work_is_done(
    tmp_path: Path, trial: TrialReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, [dict(row) for row in word_problems()])
    found = Measurement(config, trial, threads=1).measured()
    assert found.num_answers == measure.NUM_TASKS and found.reward == "number_match" and found.closes
    # A byte is a token, and the longest question has 36, with five tokens of the template; the context leaves the rest.
    assert found.prompt_length <= found.longest_prompt < 60 and found.most_tokens <= 256 - found.longest_prompt
    assert all(length <= found.most_tokens for length in found.ended)
    assert [width for width, _ in found.engine_rates] == [*WIDTHS] and min(rate for _, rate in found.engine_rates) > 0
    assert found.trainer_rate > 0 and found.question.endswith("How many?")
    monkeypatch.setattr(measure, "WORK", 1)
    short = Measurement(config, trial, threads=1).measured()
    assert short.most_tokens == measure.LEAST_TOKENS, "of a model so large that no more can be tried"


def test_answers_that_are_no_numbers_are_compared_as_they_stand(
    tmp_path: Path, trial: TrialReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "WORK", 1)
    config = config_of(tmp_path, [{"question": f"{number}?", "answer": f"word {number}"} for number in range(3)])
    found = Measurement(config, trial, threads=1).measured()
    assert found.reward == "exact_match" and (found.num_answers, found.num_right) == (3, 0)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(tmp_path: Path, trial: TrialReport) -> None:
    config = config_of(tmp_path, [{"question": "x" * 60, "answer": "1"}], max_context=64)
    with pytest.raises(ConfigError, match=r"the longest of 1 prompts of tasks has \d+ tokens, and the model can 64 with the answer"):
        Measurement(config, trial, threads=1).measured()


def test_answers_that_nearly_all_ended_say_how_much_room_they_need() -> None:
    def of(ended: tuple[int, ...], num_cut: int) -> ModelMeasurements:
        return ModelMeasurements(1, 9, 9, ended, num_cut, 64, 0, "number_match", True, "", "", ((1, 1.0),), 1.0)

    assert of((3, 5, 9), 0).answer_room == 9 and of((9,) * 9, 1).answer_room == 9
    assert of((9,) * 8, 2).answer_room is None
    assert of((3, 5), 2).mean_answer == (3 + 5 + 2 * 64) / 4
