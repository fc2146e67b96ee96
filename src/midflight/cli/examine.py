"""Examines this machine, a model or a configuration for `midflight doctor`."""

from collections.abc import Sequence
from pathlib import Path

from midflight.cli.configurations import config_of_file
from midflight.cli.put_back import put_back_at
from midflight.config import Config
from midflight.errors import ConfigError, MidflightError
from midflight.models.gguf_folders import model_folder
from midflight.run.launcher.checks.check import About, Caller, Finding, Plan, error
from midflight.run.launcher.checks.table import look
from midflight.run.launcher.folder import is_stored

MACHINE = frozenset({About.MACHINE})


def examine(asked: Path | None, overrides: Sequence[str]) -> list[Finding]:
    """Everything that is found. Raises `ConfigError` if there is nothing to look at in `asked`."""
    path = _what(asked)
    try:
        plan = _plan(path, overrides)
    except MidflightError as refused:
        name = "the defaults" if path is None else str(path)
        wrong = [error(name, line) for line in str(refused).splitlines()]
        return [*look(Plan(Config(), Caller.DOCTOR, about=MACHINE)).found, *wrong]
    put_back_at(plan.folder)
    return list(look(plan).found)


def _what(asked: Path | None) -> Path | None:
    """A file of a configuration, or a folder of a model."""
    if asked is None:
        return None
    asked = model_folder(asked)
    if asked.is_file():
        return asked
    if (asked / "config.toml").is_file():
        return asked / "config.toml"
    if (asked / "config.json").is_file():
        return asked
    raise ConfigError(
        f"{asked} is no file, and no folder with config.toml (a run) or config.json (a model); give "
        "the TOML file of a run, or such a folder."
    )


def _plan(path: Path | None, overrides: Sequence[str]) -> Plan:
    """The plan of a configuration, of the defaults on this machine, or of a model there."""
    if path is None:
        defaults = config_of_file(None, overrides, None)
        return Plan(defaults, Caller.DOCTOR, about=MACHINE | {About.ROOM})
    if path.is_file():
        return Plan(config_of_file(path, overrides, None, stored=is_stored(path)), Caller.DOCTOR)
    config = config_of_file(None, [f"model.path={path}", *overrides], None)
    return Plan(config, Caller.DOCTOR, about=MACHINE | {About.MODEL})
