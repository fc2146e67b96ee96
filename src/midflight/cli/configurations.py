"""The configuration of a command, and its checks before anything is started."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from midflight.cli.put_back import put_back_at
from midflight.config import Config, load_config
from midflight.config.cores import own_cores
from midflight.errors import ConfigError
from midflight.models.gguf_folders import model_folder
from midflight.models.sizes import sizes_of
from midflight.models.tokenizers import check_tokenizer
from midflight.run.launcher.checks import table
from midflight.run.launcher.checks.check import Findings, Plan
from midflight.run.launcher.folder import CONFIG, check_stored, is_stored
from midflight.run.launcher.measurements import ModelMeasurements
from midflight.run.launcher.trial import TrialWait, module_answer, to_terminal
from midflight.run.parts import Purpose

MAX_SERVED_CONTEXT = 4096
"""The longest context that is served unless more is asked for. Every engine slot reserves keys and
values for it.
"""


def config_of_file(
    path: Path | None, overrides: Sequence[str], folder: Path | None, *, stored: bool = False
) -> Config:
    """The configuration in a file. `folder` is the run's folder, if it is not that of the file.
    `stored`: it is that of a run that was there before, in which values that are gone are read as
    their replacements, with a note.
    """
    if folder is not None:
        overrides = [*overrides, f"run.folder={folder}"]
    config = load_config(path, overrides, note=to_terminal if stored else None)
    if path is not None and is_stored(path):
        check_stored(path)
    return config


def config_of_folder(folder: Path) -> Config:
    """Returns the configuration of the run in a folder, also if the folder has been moved."""
    put_back_at(folder)
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} has no {CONFIG}, so there is no run in it; give the folder of a run."
        )
    return config_of_file(folder / CONFIG, [], folder, stored=True)


def config_of_evaluation(
    path: Path, overrides: Sequence[str], folder: Path | None, model: Path
) -> Config:
    """The configuration of an evaluation, checked. By default it writes into a folder of its own in that of
    the run, which may be under way.
    """
    put_back_at(model, path)
    check_tokenizer(model)
    config = config_of_file(path, overrides, folder, stored=is_stored(path))
    if not any(source.has_heldout for source in config.environment.sources):
        raise ConfigError(
            f"{path}: no source holds tasks out, so there is nothing to evaluate on; set "
            "environment.sources.0.heldout."
        )
    own = config.run.folder / "evaluation" if folder is None else folder
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": own})})
    check_served(config)
    return config


def config_of_model(model: Path, given: Mapping[str, object], overrides: Sequence[str]) -> Config:
    """The checked configuration of a model that is served: the defaults, the model's own context up to a
    bound, then the options given. `--set` has the last word.
    """
    put_back_at(model)
    model = model_folder(model)
    check_tokenizer(model)
    context = min(sizes_of(model).max_context, MAX_SERVED_CONTEXT)
    options: dict[str, object] = {"model.path": model}
    if context:
        options["model.max_context"] = context
    for key, value in given.items():
        if value is not None:
            options[key] = json.dumps(value) if isinstance(value, bool | list) else value
    ours = [f"{key}={value}" for key, value in options.items()]
    config = load_config(None, [*ours, *overrides])
    check_served(config)
    return config


def engine_options(path: Path) -> dict[str, object]:
    """Returns the options in the `[engine]` of a file, by the keys of the configuration. They are
    for one engine that joins a run of another user.
    """
    section = config_of_file(path, [], None).engine.model_dump(
        exclude_unset=True, exclude={"count", "dtype"}, mode="json"
    )
    return {f"engine.{key}": value for key, value in section.items()}


def checked(plan: Plan, *, meanwhile: Callable[[], None] = lambda: None) -> Findings:
    """The findings on a run that may begin, see `table.checked`. Changes nothing, except that it
    puts back a run that was set aside in its folder.
    """
    put_back_at(plan.folder, resume=plan.resume)
    return table.checked(plan, meanwhile=meanwhile)


def check_served(config: Config) -> None:
    """Raises `ConfigError` unless engines can serve here. No tasks are drawn and nothing is trained."""
    checked(Plan(config, purpose=Purpose.SERVE))


def check_new(folder: Path, *, making: str = "a model") -> None:
    """Raises `ConfigError` unless something may be made in the folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"making {making} in {str(folder)!r}: it exists and is not empty; choose another folder"
        )


def measured(config: Config) -> ModelMeasurements:
    """Measures how the model of a configuration answers its tasks, and how quickly engine and
    trainer compute here, each with half of the cores. Raises `ConfigError` if the model cannot be
    asked. Waits for a process that tries it as long as that moves, and reports the wait.
    """
    patience = TrialWait(
        f"measuring the model in {str(config.model.path)!r}", config.run.stall_seconds
    )
    threads = str(max(1, own_cores() // 2))
    given = config.model_dump_json().encode()
    environ = {"OMP_NUM_THREADS": threads}
    answer = module_answer("measure", patience, threads, given=given, environ=environ)
    found = msgspec.json.decode(answer, type=ModelMeasurements | str)
    if isinstance(found, str):
        raise ConfigError(found)
    return found
