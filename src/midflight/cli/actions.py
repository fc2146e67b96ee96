"""What each command does: makes the configuration it stands for, checks what can be checked here, and hands over to `run`."""

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


def train(path: Path, overrides: Sequence[str], *, dry_run: bool, resume: bool, folder: Path | None) -> int:
    config = load_config(path, _with_folder(overrides, folder))
    model_sizes(config.model)  # a missing model folder is said now, not by a process that started
    check_teacher(config)
    own_loss = _own_loss(config)
    if dry_run:
        from midflight.cli.dry_run import print_report

        print_report(config, own_loss=own_loss)
        return 0
    _check_engine(config)
    from midflight.run.launcher import launch

    return launch.train(config, resume=resume)


def rollouts(path: Path, overrides: Sequence[str], *, folder: Path | None, token: str | None) -> int:
    config = load_config(path, _with_folder(overrides, folder))
    model_sizes(config.model)
    check_teacher(config)
    _check_engine(config)
    from midflight.run.launcher import launch

    return launch.rollouts(config, token=token)


def serve(model: Path, given: Mapping[str, object], overrides: Sequence[str], *, token: str | None) -> int:
    config = _config_for(model, given, overrides)
    _check_engine(config)
    from midflight.run.launcher import launch

    return launch.serve(config, token=token)


def engine(model: Path, given: Mapping[str, object], overrides: Sequence[str], *, host: str, port: int, token: str | None) -> int:
    config = _config_for(model, given, overrides)
    _check_engine(config)
    from midflight.run.launcher import launch

    return launch.engine(config, host=host, port=port, token=token)


def evaluate(path: Path, model: Path, overrides: Sequence[str], *, folder: Path | None) -> int:
    config = load_config(path, _with_folder(overrides, folder))
    sizes_of(model)
    _check_engine(config)
    from midflight.run.launcher import launch

    return launch.evaluate(config, model)


def new_model(folder: Path, overrides: Sequence[str]) -> int:
    config = load_config(None, overrides)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"making a model in {str(folder)!r}: it exists and is not empty; choose another folder")
    from midflight.run.launcher import launch

    status = launch.new_model(config, folder)
    if status == 0:
        sys.stdout.write(f"made {folder}; serve it: midflight serve --model {folder}\n")
    return status


def _own_loss(config: Config) -> str | None:
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


def _check_engine(config: Config) -> None:
    """A server whose interpreter is missing is said now, not by a process that started."""
    if config.engine.kind != "embedded":
        from midflight.run.engine.companion import check_interpreter

        check_interpreter(config.engine)


def _with_folder(overrides: Sequence[str], folder: Path | None) -> list[str]:
    return [*overrides, *([] if folder is None else [f"run.folder={folder}"])]


def _config_for(model: Path, given: Mapping[str, object], overrides: Sequence[str]) -> Config:
    """The defaults, the model's own context up to a bound, then the options given; `--set` has the last word."""
    context = min(sizes_of(model).max_context, MAX_SERVED_CONTEXT)
    options: dict[str, object] = {"model.path": model, **({"model.max_context": context} if context else {})}
    options |= {key: value for key, value in given.items() if value is not None}
    return load_config(None, [*(f"{key}={value}" for key, value in options.items()), *overrides])
