"""The configuration that a command stands for, checked as far as can be before anything is started: then a mistake is told at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from midflight import given
from midflight.config import Config, load_config
from midflight.config.agent import agent_of
from midflight.config.derived import model_sizes
from midflight.config.folders import check_same_model, check_teacher, check_tokenizer
from midflight.errors import ConfigError
from midflight.models.sizes import sizes_of
from midflight.run.launcher.folder import CONFIG, check_kept
from midflight.run.launcher.preflight import Findings
from midflight.run.parts import TOKEN_VARIABLE

MAX_SERVED_CONTEXT = 4096
"""Unless asked for more: every engine slot reserves keys and values for the longest context."""


PREFLIGHT_SECONDS = 120.0
"""Longer than that no module should take to be imported."""
PROOF_SECONDS = 600.0
"""A wide model's small copy has layers of its width, which a processor goes through slowly."""


def config_of_run(path: Path, overrides: Sequence[str], folder: Path | None) -> Config:
    """Of a file; with the models that it names."""
    config = config_of_file(path, overrides, folder)
    model_sizes(config.model)
    check_teacher(config)
    return config


def config_of_file(path: Path | None, overrides: Sequence[str], folder: Path | None) -> Config:
    """`folder` is where the run writes, if not where the file says."""
    return load_config(path, [*overrides, *([] if folder is None else [f"run.folder={folder}"])])


def config_of_folder(folder: Path) -> Config:
    """That of the run which is in the folder, wherever the folder has been moved to."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} has no {CONFIG}, so there is no run in it; give the folder of a run.")
    return config_of_file(folder / CONFIG, [], folder)


def config_of_evaluation(path: Path, overrides: Sequence[str], folder: Path | None, model: Path) -> Config:
    """It writes into a folder of its own in that of the run, which may be under way, unless told otherwise."""
    check_tokenizer(model)
    config = config_of_file(path, overrides, folder)
    if not any(source.has_heldout for source in config.environment.sources):
        raise ConfigError(f"{path}: no source holds tasks out, so there is nothing to evaluate on; set environment.sources.0.heldout.")
    own = config.run.folder / "evaluation" if folder is None else folder
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": own})})


def config_of_model(model: Path, given: Mapping[str, object], overrides: Sequence[str]) -> Config:
    """The defaults, the model's own context up to a bound, then the options given; `--set` has the last word."""
    check_tokenizer(model)
    context = min(sizes_of(model).max_context, MAX_SERVED_CONTEXT)
    options: dict[str, object] = {"model.path": model, **({"model.max_context": context} if context else {})}
    options |= {key: json.dumps(value) if isinstance(value, bool | list) else value for key, value in given.items() if value is not None}
    return load_config(None, [*(f"{key}={value}" for key, value in options.items()), *overrides])


def engine_options(path: Path) -> dict[str, object]:
    """What the `[engine]` of a file says, by the keys of the configuration: for one engine, of a run that is another's."""
    section = config_of_file(path, [], None).engine.model_dump(exclude_unset=True, exclude={"count", "dtype"}, mode="json")
    return {f"engine.{key}": value for key, value in section.items()}


def check_engine(config: Config) -> None:
    """Whether the interpreter of a server is there."""
    if config.engine.kind != "embedded":
        from midflight.run.engine.companion import check_interpreter

        check_interpreter(config.engine)


def check_places(config: Config) -> None:
    """Whether the run's places are to be had: of a cluster every machine is asked. Nothing is started, and it is left connected."""
    if config.cluster.kind == "ray":
        from midflight.run.launcher.ending import main_task
        from midflight.run.places.checks import check_cluster
        from midflight.run.places.ray import connect

        cluster = connect(config)
        if main_task(check_cluster(cluster, config)) != 0:
            raise KeyboardInterrupt


def check_new(folder: Path, *, making: str = "a model") -> None:
    """Whether something may be made in the folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"making {making} in {str(folder)!r}: it exists and is not empty; choose another folder")


def preflight(config: Config, *, objects: bytes = given.NOTHING, meanwhile: Callable[[], None] = lambda: None) -> Findings:
    """What the machine and the user's code say to it; `ConfigError` with all that is wrong.

    `objects`: what a Python program gives to its run, packed. They are asked in a process of their own, because this one does without torch
    and without the user's modules. Waits for that: some seconds, at most `PREFLIGHT_SECONDS`, in which `meanwhile` is done.
    """
    command = [sys.executable, "-m", "midflight.run.launcher.preflight"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ.pop(TOKEN_VARIABLE, None)
    trying = f"trying the configuration (the agent is {agent_of(config.environment)!r}, objective.kind is {config.objective.kind!r})"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as trial:
        try:
            meanwhile()
            out, errors = trial.communicate(objects + config.model_dump_json().encode(), timeout=PREFLIGHT_SECONDS)
        except subprocess.TimeoutExpired as late:
            said = (late.stderr or b"").decode(errors="replace")
            raise ConfigError(
                f"{trying} did not end within {PREFLIGHT_SECONDS:.0f} s; look at what these modules do when imported.{_end(said)}"
            ) from late
        finally:
            trial.kill()  # what has ended by itself keeps its status
    if trial.returncode != 0:
        raise ConfigError(f"the process {trying} ended with status {trial.returncode}.{_end(errors.decode(errors='replace'))}")
    found = msgspec.json.decode(out, type=Findings)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return found


def proofs(model: Path, max_context: int) -> list[tuple[bool, str]]:
    """For trainer, embedded engine and export: whether they compute what the model computes, and a line about it. `ConfigError` where the folder
    is no model. Waits for a process that tries them: seconds, at most `PROOF_SECONDS`."""
    command = [sys.executable, "-m", "midflight.run.launcher.proofs", str(model), str(max_context)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=environ, timeout=PROOF_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise ConfigError(
            f"checking the model in {str(model)!r} did not end within {PROOF_SECONDS:.0f} s; try it on a faster machine."
        ) from late
    if done.returncode != 0:
        raise ConfigError(
            f"checking the model in {str(model)!r} ended with status {done.returncode}.{_end(done.stderr.decode(errors='replace'))}"
        )
    found = msgspec.json.decode(done.stdout, type=list[tuple[bool, str]] | str)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _end(said: str) -> str:
    lines = said.splitlines()[-5:]
    return "".join(f"\n{line}" for line in ["The last it said:", *lines]) if lines else ""


def check_folder(config: Config, *, resume: bool = False, overwrite: bool, resumable: bool = True) -> None:
    """Whether the command may use the folder as it is; reads only."""
    check_kept(config, resume=resume, overwrite=overwrite, resumable=resumable)
    if resume:
        check_same_model(config)
