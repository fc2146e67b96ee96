"""What `midflight doctor` looks at: this machine, a model, or a configuration."""

from collections.abc import Sequence
from pathlib import Path

from midflight.cli.configurations import config_of_file
from midflight.cli.put_back import put_back_at
from midflight.config import Config
from midflight.errors import ConfigError, MidflightError
from midflight.models.gguf_folders import model_folder
from midflight.run.launcher.checks.check import About, Caller, Finding, Plan, Severity
from midflight.run.launcher.checks.table import look

MACHINE = frozenset({About.MACHINE})


def examine(asked: Path | None, overrides: Sequence[str]) -> list[Finding]:
    """Everything that is found. Raises `ConfigError` if there is nothing to look at in `asked`."""
    path = _what(asked)
    try:
        plan = _plan(path, overrides)
    except MidflightError as error:
        name = "the defaults" if path is None else str(path)
        wrong = [Finding(Severity.ERROR, name, line) for line in str(error).splitlines()]
        plan = Plan(config=Config(), caller=Caller.DOCTOR, about=MACHINE)
        return [*look(plan).found, *wrong]
    put_back_at(plan.folder)
    found = look(plan)
    return [*found.found, *([] if found.problems else _sound(path, plan))]


def _what(asked: Path | None) -> Path | None:
    """A file of a configuration, or a folder of a model."""
    if asked is None:
        return None
    asked = model_folder(asked)
    if asked.is_file():
        return asked
    if not asked.is_dir():
        raise ConfigError(
            f"{asked} is not there; give the TOML file of a run, or the folder of a model or a run."
        )
    if (asked / "config.toml").is_file():
        return asked / "config.toml"
    if (asked / "config.json").is_file():
        return asked
    raise ConfigError(
        f"{asked} has neither config.json (a model) nor config.toml (a run); give the TOML file of "
        "a run, or such a folder."
    )


def _plan(path: Path | None, overrides: Sequence[str]) -> Plan:
    """The plan of a configuration, of the defaults on this machine, or of these with a model."""
    if path is not None and path.is_file():
        return Plan(config=config_of_file(path, overrides, None), caller=Caller.DOCTOR)
    defaults = config_of_file(None, overrides, None)
    if path is None:
        return Plan(config=defaults, caller=Caller.DOCTOR, about=MACHINE)
    section = defaults.model.model_copy(update={"path": path})
    return Plan(
        config=defaults,
        elsewhere=defaults.model_copy(update={"model": section}),
        caller=Caller.DOCTOR,
        about=MACHINE | {About.MODEL},
    )


def _sound(path: Path | None, plan: Plan) -> list[Finding]:
    """Says what was looked at, if nothing is wrong."""
    if path is None:
        text = "devices, disk, shared memory and port are there"
        return [Finding(Severity.OK, "a default run", text)]
    if About.RUN not in plan.about:
        return []
    return [
        Finding(
            Severity.OK,
            "configuration",
            f"{path} can run: environment, tasks, prompt, devices, disk, shared memory and port",
            f"what it would do: midflight train {path} --dry-run",
        )
    ]
