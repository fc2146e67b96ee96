"""Options that are gone: a configuration is refused by their names, and a run of before goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.archive.conversation import config_of
from midflight.cli import main
from midflight.cli.configurations import config_of_file, config_of_folder
from midflight.config import load_config
from midflight.config.load import past_config
from midflight.config.options import options, tables
from midflight.config.replaced import REMOVED
from midflight.errors import ConfigError
from midflight.python.trainer import Trainer

STORED = Path(__file__).with_name("stored.toml")
"""The configuration of `configs/demo.toml` as a run of version 0.2 wrote it into its folder when it had all these options."""
EXPECTED = {
    "engine.pause_lease_seconds": "weights.commit_seconds",
    "gateway.max_requests": "gateway.max_sessions",
    "gateway.orphan_seconds": "gateway.request_seconds",
    "environment.mcp.*.name": "its address",
    "curriculum.floor": "always 0.05",
    "curriculum.hard_below": "always 0.1",
    "curriculum.easy_above": "always 0.9",
    "curriculum.window": "always 16",
    "rollout.buffer_bytes": "rollout.buffer_groups",
    "rollout.requeues": "requeued once",
    "evaluation.max_in_flight": "as the engines hold",
    "evaluation.keep": "32 rollouts",
    "objective.delta_low": "objective.delta",
    "distillation.score_seconds": "run.stall_seconds",
    "weights.full_every": "every 16th version",
    "environment.sandbox.output_bytes": "1 000 000 bytes",
    "environment.tool_concurrency": "64 tools at once",
    "environment.count_all_choices": "a session that is opened over HTTP",
    "environment.system": "environment.sources.*.system",
    "trainer.max_missing_share": "a tenth",
    "trainer.devices": "engine.servers.*.devices",
    "engine.servers.*.arguments": "engine.urls",
    "gateway.hosts": "gateway.public_url",
    "observe.view": "where one is installed",
    "evaluation.suites.*.pass_at": "evaluation.suites.*.samples",
    "evaluation.suites.*.passes": "curriculum.passes",
    "curriculum.target": "curriculum.priority",
    "cluster.engines_max": "engine.count",
    "weights.max_paused": "one engine of each 64",
}


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def stored_in(folder: Path, *changes: tuple[str, str]) -> Path:
    """The stored configuration in the folder of a run."""
    text = STORED.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").touch()
    path = folder / "config.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_a_removed_option_is_refused_by_its_name_with_what_to_use_in_its_place(key: str, tmp_path: Path) -> None:
    section, _, name = key.replace("*", "0").rpartition(".")
    text = f"[{section}]\n"
    if section.endswith(".0"):
        text = f"[[{section.removesuffix('.0')}]]\n"
    path = tmp_path / "run.toml"
    path.write_text(f"{text}{name} = 7\n")
    for said in (refusal(path), refusal(None, f"{section}.{name}=7")):
        assert f"{section}.{name} (value 7) is gone: " in said and EXPECTED[key] in said and len(said.splitlines()) == 1
    assert refusal(path).startswith(f"{path}: ")
    assert refusal(None, f"{section}.{name}=7").startswith(f"--set {section}.{name}: ")


def test_what_is_named_in_place_of_a_removed_option_is_an_option() -> None:
    known = {*options(), *tables()}
    for key, removed in REMOVED.items():
        assert key not in known
        for word in removed.instead.replace(",", " ").replace(";", " ").split():
            assert "." not in word or word[0].isdigit() or word in known, f"{key}: {word}"


def test_a_program_is_refused_alike(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.requeues \(value 3\) is gone: a task is requeued once"):
        Trainer(folder=tmp_path, config={"rollout": {"requeues": 3}})


def test_a_run_of_before_goes_on_from_the_configuration_in_its_folder(tmp_path: Path) -> None:
    path = stored_in(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.requeues \(value 1\) is gone"):
        load_config(path)
    # Its micro-batches keep the size that was the default then, and its buffer that of the demo of then.
    then = ["run.folder=runs/demo", "trainer.micro_batch_tokens=4096", "rollout.buffer_groups=16"]
    config = load_config(Path("configs/demo.toml"), then)
    for resumed in (config_of_file(path, [], None, stored=True), config_of_folder(tmp_path), Trainer(config=path).config):
        assert resumed.model_copy(update={"run": config.run}) == config


def test_a_run_that_had_set_one_of_them_is_refused_before_anything_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored_in(tmp_path / "run", ("requeues = 1", "requeues = 3"), ("window = 16", "window = 8"))
    before = {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()}
    assert main(["train", str(path), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "rollout.requeues (value 3) is gone" in said and "curriculum.window (value 8) is gone" in said
    assert "full_every" not in said, "it had its default"
    assert {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()} == before


def test_a_stored_option_that_said_the_same_as_another_is_no_news(tmp_path: Path) -> None:
    """A run on a cluster wrote the number of its engines under both names."""
    path = stored_in(tmp_path / "run", ("\ncount = 1\n", "\ncount = 4\n"), ("lost_seconds = 20.0", "lost_seconds = 20.0\nengines_max = 4"))
    assert config_of_folder(tmp_path / "run").engine.count == 4
    path.write_text(path.read_text().replace("engines_max = 4", "engines_max = 3"))
    with pytest.raises(ConfigError, match=r"cluster\.engines_max \(value 3\) is gone: engine\.count"):
        config_of_folder(tmp_path / "run")


def test_who_looks_at_a_past_run_reads_all_the_rest_whatever_was_set(tmp_path: Path) -> None:
    """Its options that are gone had other values, and a service that it told is not installed here."""
    changes = [
        ("requeues = 1", "requeues = 3"),
        ('tool_format = "auto"', 'tool_format = "mistral"'),
        ("trackers = []", 'trackers = ["wandb"]'),
    ]
    path = stored_in(tmp_path, *changes)
    assert past_config(path).gateway.tool_format == "mistral" and config_of(tmp_path) == past_config(path)
    path.write_text(path.read_text().replace("steps = 340", "steps = 0"))
    with pytest.raises(ConfigError, match=r"run\.steps must be >= 1"):
        past_config(path)


def test_a_past_run_of_another_midflight_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = stored_in(tmp_path, ("steps = 340", "steps = 340\nnew_option = 3"))
    with pytest.raises(
        ConfigError, match=r"unknown key 'run\.new_option' \(value 3\)\. Another version of Midflight made the run; look at"
    ):
        past_config(path)


def test_an_override_of_a_resumed_run_is_refused_even_with_the_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set rollout\.requeues: rollout\.requeues \(value 1\) is gone"):
        config_of_file(stored_in(tmp_path), ["rollout.requeues=1"], None, stored=True)
