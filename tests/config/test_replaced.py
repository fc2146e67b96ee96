"""Values that are gone: a new configuration with one is refused by name, and a run that was begun with one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from midflight.archive.conversation import config_of
from midflight.cli.configurations import config_of_file, config_of_folder, is_stored
from midflight.config import load_config
from midflight.config.dump import as_toml
from midflight.config.options import option_at
from midflight.config.replaced import REPLACED
from midflight.errors import ConfigError
from midflight.run.launcher.folder import CONFIG, JOURNAL

RAY = "cluster.kind=ray"


def stored(folder: Path, transport: str, *overrides: str) -> Path:
    """The configuration in the folder of a run that was begun with this transport."""
    whole = as_toml(load_config(None, [f"run.folder={folder}", "weights.transport=pull", *overrides]))
    (folder / JOURNAL).touch()
    path = folder / CONFIG
    path.write_text(whole.replace('transport = "pull"', f'transport = "{transport}"'))
    return path


def message(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_new_configuration_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[weights]\ntransport = "file"\n')
    assert message(path).startswith(f'{path}: weights.transport = "file" is gone; set it to "shared_memory", which maps a file in the run')
    assert message(None, "weights.transport=collective").startswith(
        '--set weights.transport: weights.transport = "collective" is gone; set it to "pull"'
    )
    with pytest.raises(ConfigError, match='"file" is gone; set it to "shared_memory"'):
        load_config(None, table={"weights": {"transport": "file"}})


def test_a_run_that_was_begun_with_one_goes_on_with_its_replacement_and_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, "file")
    assert config_of_file(path, [], None, stored=True).weights.transport == "shared_memory"
    assert config_of_folder(tmp_path).weights.transport == "shared_memory"
    assert capsys.readouterr().err == 2 * 'midflight: weights.transport was "file", which is gone; it is read as "auto".\n'
    path = stored(tmp_path, "collective")
    assert config_of_file(path, [], None, stored=True).weights.transport == "pull"
    assert 'weights.transport was "collective", which is gone; it is read as "pull".' in capsys.readouterr().err
    with pytest.raises(ConfigError, match='"collective" is gone'):
        config_of_file(path, [], None)


def test_a_run_over_machines_that_shared_a_folder_goes_on_by_pull(tmp_path: Path) -> None:
    path = stored(tmp_path, "file", RAY)
    assert config_of_file(path, [], None, stored=True).weights.transport == "pull"


def test_what_is_said_for_a_resumed_run_is_new(tmp_path: Path) -> None:
    path = stored(tmp_path, "file")
    assert config_of_file(path, ["weights.transport=pull"], None, stored=True).weights.transport == "pull"
    with pytest.raises(ConfigError, match=r'--set weights\.transport: .* = "collective" is gone'):
        config_of_file(path, ["weights.transport=collective"], None, stored=True)


def test_what_such_a_run_left_is_read_as_before(tmp_path: Path) -> None:
    path = stored(tmp_path, "file", "engine.max_running=3")
    assert is_stored(path) and not is_stored(tmp_path / "run.toml")
    assert config_of(tmp_path).engine.max_running == 3


def test_a_stored_configuration_without_such_a_value_is_read_without_a_note(tmp_path: Path) -> None:
    said = list[str]()
    load_config(stored(tmp_path, "pull"), note=said.append)
    assert said == []


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REPLACED.items() for value in values])
def test_what_is_gone_is_no_choice_and_its_replacement_is(key: str, value: str) -> None:
    option = option_at(tuple(key.split(".")))
    assert option is not None and value not in option.choices
    assert REPLACED[key][value].value in option.choices
