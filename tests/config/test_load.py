"""Loading: what a user gets wrong is named with the file, the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.config import load_config
from midflight.errors import ConfigError
from midflight.types import PauseMode, StalePolicy


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def message(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_file_fills_the_sections_and_the_rest_has_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, '[run]\nname = "x"\nfolder = "out"\n[rollout]\nstale_policy = "drop"\npause_mode = "keep"\n'))
    assert (config.run.name, config.run.folder, config.run.steps) == ("x", Path("out"), 100)
    assert config.rollout.stale_policy is StalePolicy.DROP
    assert config.rollout.pause_mode is PauseMode.KEEP


def test_bad_toml_is_named_by_file_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nname = \n")
    assert message(path).startswith(f"{path}:2:8: not valid TOML: Invalid value")


def test_toml_that_ends_too_early_is_named(tmp_path: Path) -> None:
    assert "at the end of the file" in message(write(tmp_path, '[run]\nname = """abc'))


def test_a_missing_file_names_its_path_and_a_near_one(tmp_path: Path) -> None:
    near = write(tmp_path, "")
    assert message(tmp_path / "rum.toml") == f"there is no config file {tmp_path / 'rum.toml'}. Did you mean {near}?"


def test_a_folder_and_a_binary_file_are_refused_in_words(tmp_path: Path) -> None:
    assert "can't be read" in message(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in message(tmp_path / "b.toml")


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, "[rollout]\ngroupsize = 8\n")
    assert message(path) == f"{path}: unknown key 'rollout.groupsize' (value 8). Did you mean 'rollout.group_size'?"


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(tmp_path: Path) -> None:
    assert "Did you mean 'rollout.group_size'?" in message(write(tmp_path, "[trainer]\ngroup_size = 8\n"))


def test_an_unknown_section_and_unknown_keys_inside_lists_are_found(tmp_path: Path) -> None:
    text = '[rolout]\nx = 1\n[[environment.sources]]\ndataset = "a"\nsise = 3\n'
    lines = message(write(tmp_path, text)).splitlines()
    assert len(lines) == 2
    assert "'rolout'" in lines[0] and "Did you mean 'rollout'?" in lines[0]
    assert "'environment.sources.0.sise'" in lines[1] and "environment.sources.*.size" in lines[1]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_size=0", "rollout.group_size must be >= 1, got 0"),
        ("critic.discount=1.5", "critic.discount must be >= 0 and <= 1, got 1.5"),
        ("objective.kind=gsp", "'kl_cov', 'module:function', got 'gsp'. Did you mean 'gspo'?"),
        ("run.steps=true", "run.steps must be a whole number >= 1, got True"),
        ("run.steps=2.5", "run.steps must be a whole number >= 1, got 2.5"),
        ("run.steps=ten", "run.steps must be a whole number >= 1, got 'ten'"),
        ("trainer.learning_rate=nan", "trainer.learning_rate must be a number > 0 and <= 1, got nan"),
        ("trainer.learning_rate=inf", "trainer.learning_rate must be a number > 0 and <= 1, got inf"),
        ("rollout.pause_mode=kep", "got 'kep'. Did you mean 'keep'?"),
        ("weights.commit=roling", "weights.commit must be one of 'rolling', 'barrier', got 'roling'. Did you mean 'rolling'?"),
        ("rollout=3", "rollout must be a table of options, got 3; write [rollout]"),
        ("environment.sources=3", "environment.sources must be a list of tables, got 3; write [[environment.sources]]"),
        (
            "environment.sources.1.size=3",
            "environment.sources.1 says nothing of where its tasks are from; give it exactly one of dataset, path, entry and posted",
        ),
    ],
)
def test_a_bad_value_is_refused_in_plain_words(override: str, expected: str) -> None:
    assert expected in message(None, override)


def test_all_bad_values_are_named_at_once() -> None:
    assert len(message(None, "run.steps=0", "rollout.group_size=0").splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "an override is KEY=VALUE"),
        ("=3", "an override is KEY=VALUE"),
        ("run..steps=3", "empty part"),
        ("environment.sources.4.size=3", "has 1 entries; use an index from 0 to 1"),
        ("run.steps.more=3", "run.steps must be a whole number"),
    ],
)
def test_a_malformed_override_is_refused(override: str, expected: str) -> None:
    assert expected in message(None, override)


def test_an_override_through_a_value_is_refused(tmp_path: Path) -> None:
    assert "run.steps holds the value 5" in message(write(tmp_path, "[run]\nsteps = 5\n"), "run.steps.more.most=3")


def test_overrides_are_toml_values_with_bare_text_as_fallback() -> None:
    config = load_config(None, ["run.name=demo", "run.folder=a/b c", "trainer.learning_rate=1e-4", "rollout.drop_zero_spread=true"])
    assert (config.run.name, str(config.run.folder), config.trainer.learning_rate) == ("demo", "a/b c", 1e-4)
    assert config.rollout.drop_zero_spread


def test_text_that_looks_like_a_number_stays_text() -> None:
    assert load_config(None, ["run.name=123"]).run.name == "123"


def test_none_unsets_an_option_that_may_be_unset() -> None:
    config = load_config(None, ["objective.kind=ppo", "correction.cap=none", "rollout.max_in_flight=none"])
    assert config.correction.cap is None and config.rollout.max_in_flight is None


def test_list_members_are_reached_by_index_also_in_the_default_list(tmp_path: Path) -> None:
    changed = load_config(None, ["environment.sources.0.size=100", "environment.sources.1.dataset=chain_sum"])
    assert [(s.dataset, s.size) for s in changed.environment.sources] == [("spell_backward", 100), ("chain_sum", None)]
    path = write(tmp_path, '[[environment.sources]]\ndataset = "a"\n[[environment.sources]]\ndataset = "b"\nsize = 7\n')
    config = load_config(path, ["environment.sources.1.options.min_word_len=3"])
    assert [(s.dataset, s.size) for s in config.environment.sources] == [("a", None), ("b", 7)]
    assert config.environment.sources[1].options == {"min_word_len": 3}


def test_a_later_override_wins_and_the_message_blames_the_override_not_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[run]\nsteps = 5\n")
    assert load_config(path, ["run.steps=6", "run.steps=7"]).run.steps == 7
    assert message(path, "run.steps=0").startswith("--set run.steps: ")


def test_what_the_loader_gives_survives_the_trip_to_another_process() -> None:
    config = load_config(None, ["objective.kind=ppo", "rollout.pause_mode=keep"])
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_every_shipped_configuration_loads() -> None:
    files = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
    assert files
    for file in files:
        load_config(file)


@pytest.mark.parametrize(("written", "read"), [("7", 7), ("0.25", 0.25), ('"held.jsonl"', Path("held.jsonl")), ('"none"', None)])
def test_what_is_held_out_is_a_number_a_share_or_a_file(tmp_path: Path, written: str, read: object) -> None:
    path = write(tmp_path, f'[[environment.sources]]\npath = "x.jsonl"\nheldout = {written}\n')
    assert load_config(path).environment.sources[0].heldout == read


def test_what_is_held_out_is_refused_in_words() -> None:
    assert "must be a whole number >= 0 or a number >= 0 and < 1 or text" in message(None, "environment.sources.0.heldout=-1")
