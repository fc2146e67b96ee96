"""What a command says when it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.config.sections import Config
from midflight.run.launcher import launch, opening


def test_a_training_says_model_loss_staleness_and_places_in_a_few_lines() -> None:
    config = load_config(Path("configs/demo.toml"), ["run.folder=elsewhere"])
    lines = [*opening.beginning(config).splitlines(), *opening.training(config).splitlines()]
    assert [line.partition(" ")[0] for line in lines[:5]] == ["demo:", "model:", "tasks:", "staleness:", "loss"]
    assert "folder: elsewhere, with numbers in metrics.jsonl and what the parts print in elsewhere/logs" in lines
    assert len(lines) < 16


def test_what_a_run_will_be_is_said_at_once_and_not_again(capsys: pytest.CaptureFixture[str]) -> None:
    launch.begin(load_config(None, ["observe.log_format=json"]))
    assert "staleness: no trained token" in json.loads(capsys.readouterr().out)["message"]
    assert "staleness: " not in opening.training(Config()) + opening.rolling_out(Config())


def test_a_loss_of_the_users_own_says_its_words() -> None:
    assert "  spo: delta = 0.3" in opening.training(Config(), own_loss="spo: delta = 0.3").splitlines()


def test_without_staleness_every_batch_is_sampled_by_its_own_version() -> None:
    config = load_config(None, ["rollout.max_staleness=0"])
    assert "every batch is sampled by the version that it trains" in opening.beginning(config)
    assert "note: rollout.max_staleness = 0" in opening.training(config)


def test_rollouts_for_a_foreign_trainer_say_no_loss() -> None:
    said = opening.rolling_out(Config())
    assert "trainer: yours" in said and "loss =" not in said


def test_attached_servers_are_named_by_their_addresses() -> None:
    config = load_config(None, ["engine.kind=vllm", 'engine.urls=["http://127.0.0.1:1", "http://127.0.0.1:2"]'])
    assert opening.serving(config).endswith("with 2 vllm engines at http://127.0.0.1:1, http://127.0.0.1:2; logs: runs/run/logs")
    assert "logs" not in opening.serving(config, logs=False)
    assert "held-out tasks: 256 of spell_backward; logs: runs/run/logs" in opening.evaluating(config)
