"""The configuration that a command stands for, checked as far as can be before anything is started: then a mistake is told at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from midflight.config import Config, load_config
from midflight.config.derived import model_sizes
from midflight.config.folders import check_teacher
from midflight.config.formulas import OBJECTIVES
from midflight.errors import ConfigError
from midflight.models.sizes import sizes_of

MAX_SERVED_CONTEXT = 4096
"""Unless asked for more: every engine slot reserves keys and values for the longest context."""


def config_of_run(path: Path, overrides: Sequence[str], folder: Path | None) -> Config:
    """Of a file; with the models that it names."""
    config = config_of_file(path, overrides, folder)
    model_sizes(config.model)
    check_teacher(config)
    return config


def config_of_file(path: Path | None, overrides: Sequence[str], folder: Path | None) -> Config:
    """`folder` is where the run writes, if not where the file says."""
    return load_config(path, [*overrides, *([] if folder is None else [f"run.folder={folder}"])])


def config_of_model(model: Path, given: Mapping[str, object], overrides: Sequence[str]) -> Config:
    """The defaults, the model's own context up to a bound, then the options given; `--set` has the last word."""
    context = min(sizes_of(model).max_context, MAX_SERVED_CONTEXT)
    options: dict[str, object] = {"model.path": model, **({"model.max_context": context} if context else {})}
    options |= {key: value for key, value in given.items() if value is not None}
    return load_config(None, [*(f"{key}={value}" for key, value in options.items()), *overrides])


def check_engine(config: Config) -> None:
    """Whether the interpreter of a server is there."""
    if config.engine.kind != "embedded":
        from midflight.run.engine.companion import check_interpreter

        check_interpreter(config.engine)


def check_new(folder: Path) -> None:
    """Whether a model may be made in the folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"making a model in {str(folder)!r}: it exists and is not empty; choose another folder")


def own_loss(config: Config) -> str | None:
    """What a loss of the user's own says of itself; none if it is one of ours. `ConfigError` where it cannot be trained with.

    It is tried in a process of its own, because this one does without torch. Waits for that: some seconds.
    """
    if config.objective.kind in OBJECTIVES:
        return None
    command = [sys.executable, "-m", "midflight.trainer.own_loss"]
    tried = subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True, check=False)
    if tried.returncode == 2:
        raise ConfigError(tried.stdout)
    if tried.returncode != 0:
        end = "\n".join(tried.stderr.splitlines()[-5:])
        raise ConfigError(
            f"objective.kind is {config.objective.kind!r}, and the process that tried it ended with status {tried.returncode}:\n{end}"
        )
    return tried.stdout
