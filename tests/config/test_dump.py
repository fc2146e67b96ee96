"""A configuration written out is the same when it is read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.config.dump import as_toml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

ODD = [
    'run.name=a "quoted" \\ näme\t[x]',
    "trainer.learning_rate=1e-20",
    "correction.veto_low=1e-4",
    'engine.kind="sglang"',
    'engine.arguments=["--a=1", "b # c"]',
    "rollout.stale_policy=mask",
    'environment.sources=[{dataset="x", only="[a-z]+\\n", options={a=[1, 2.5, {b="c d"}], "e f"=true}}, {dataset="y"}]',
]


@pytest.mark.parametrize("path", [None, *CONFIGS], ids=str)
def test_what_is_written_is_what_was_read(path: Path | None, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(as_toml(config := load_config(path)))
    assert load_config(tmp_path / "config.toml") == config


def test_odd_texts_and_nested_options_are_written_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(as_toml(config := load_config(None, ODD)))
    assert load_config(tmp_path / "config.toml") == config
    assert config.environment.sources[0].options["a"] == [1, 2.5, {"b": "c d"}]
