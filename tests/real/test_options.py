"""What the dry run accepts makes a step: drawn configurations as real processes. `make test-options` tries fifty, as every night does."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fuzz.drawing import FOREIGN, KEYS, POOLS, table_of
from tests.fuzz.playing import accepted, answering, checks_here, is_vast, write_files

from midflight.config import Config
from midflight.config.dump import as_toml
from midflight.errors import MidflightError

from .processes import ENVIRON, Command

pytestmark = pytest.mark.timeout(7200)
NUM_CASES = int(os.environ.get("MIDFLIGHT_OPTION_CASES", "2"))
SEED = int(os.environ.get("MIDFLIGHT_OPTION_SEED", "0"))
MOST_KEYS = 4
PATIENCE = 300.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENVIRON, "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    with answering() as url:
        yield {"LIVE": url, "STORE": str(tmp_path / "store"), "PYTHON": str(tmp_path / "python")}


def drawn(dice: random.Random, words: dict[str, str]) -> Iterator[tuple[dict[str, object], Config]]:
    """Values that the checks accept in this process, with their configuration, without an end."""
    while True:
        keys = sorted(dice.sample(KEYS, dice.randint(1, MOST_KEYS)))
        values = {key: dice.choice(FOREIGN if dice.randrange(20) == 0 else POOLS[key]) for key in keys}
        try:
            with checks_here():
                config, _, _ = accepted(table_of(values, words))
        except MidflightError:
            continue
        if can_be_run(config):
            yield values, config


def can_be_run(config: Config) -> bool:
    """Whether it needs neither people, nor another server, nor longer than anybody waits."""
    num_processes = config.engine.count + config.trainer.ranks + config.gateway.shards + (config.environment.workers or 0)
    return (
        not is_vast(config)
        and not all(source.posted for source in config.environment.sources)
        and config.engine.kind == "embedded"
        and not config.trainer.compile
        and num_processes <= 8
    )


def test_what_the_dry_run_accepts_makes_a_step_in_real_processes(tmp_path: Path, words: dict[str, str]) -> None:
    cases = drawn(random.Random(SEED), words)
    num_played = 0
    while num_played < NUM_CASES:
        values, config = next(cases)
        said_of = f"seed {SEED}: {values}"
        run = config.run.model_copy(update={"folder": Path("run"), "steps": 1})
        (tmp_path / "drawn.toml").write_text(as_toml(config.model_copy(update={"run": run})))
        dry = ended("train", "drawn.toml", "--dry-run", folder=tmp_path)
        if dry[0] == 2:
            continue  # what this process cannot see, such as a port that a neighbour has taken
        assert dry[0] == 0, f"{said_of}\n{dry[1]}"
        status, said = ended("train", "drawn.toml", "--overwrite", folder=tmp_path)
        assert status == 0 and (tmp_path / "run" / "model").is_dir(), f"{said_of}\n{said}"
        num_played += 1


def ended(*words: str, folder: Path) -> tuple[int, str]:
    command = Command(*words, folder=folder)
    try:
        return command.wait(PATIENCE), command.said
    finally:
        command.end()
