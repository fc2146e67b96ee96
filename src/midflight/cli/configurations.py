"""The configuration of a command. It is checked as far as possible before anything is started, so
that a mistake is reported at once.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from midflight import given
from midflight.cli.put_back import put_back_at
from midflight.config import Config, load_config
from midflight.config.agent import agent_of
from midflight.config.cores import own_cores
from midflight.config.derived import model_sizes
from midflight.config.model_checks import check_same_model, check_teacher, check_tokenizer
from midflight.config.sections import RunSection
from midflight.errors import ConfigError
from midflight.models.gguf_folders import model_folder
from midflight.models.sizes import sizes_of
from midflight.run.endpoint import TOKEN_VARIABLE
from midflight.run.launcher.folder import CONFIG, is_stored
from midflight.run.launcher.folder_checks import check_run_folder
from midflight.run.launcher.measurements import ModelMeasurements
from midflight.run.launcher.preflight import Findings
from midflight.run.launcher.trial import TrialFailed, TrialWait, answer_of, to_terminal

MAX_SERVED_CONTEXT = 4096
"""The longest context that is served unless more is asked for. Every engine slot reserves keys and
values for it.
"""


def config_of_run(
    path: Path, overrides: Sequence[str], folder: Path | None, *, stored: bool = False
) -> Config:
    """The configuration in a file, with the models that it names."""
    config = config_of_file(path, overrides, folder, stored=stored)
    model_sizes(config.model)
    check_teacher(config)
    return config


def config_of_file(
    path: Path | None, overrides: Sequence[str], folder: Path | None, *, stored: bool = False
) -> Config:
    """The configuration in a file. `folder` is the run's folder, if it is not that of the file.
    `stored`: it is that of a run that was there before, in which values that are gone are read as
    their replacements, with a note.
    """
    if folder is not None:
        overrides = [*overrides, f"run.folder={folder}"]
    return load_config(path, overrides, note=to_terminal if stored else None)


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
    """The configuration of an evaluation. By default it writes into a folder of its own in that of
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
    return config.model_copy(update={"run": config.run.model_copy(update={"folder": own})})


def config_of_model(model: Path, given: Mapping[str, object], overrides: Sequence[str]) -> Config:
    """The configuration of a model that is served: the defaults, the model's own context up to a
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
    return load_config(None, [*ours, *overrides])


def engine_options(path: Path) -> dict[str, object]:
    """Returns the options in the `[engine]` of a file, by the keys of the configuration. They are
    for one engine that joins a run of another user.
    """
    section = config_of_file(path, [], None).engine.model_dump(
        exclude_unset=True, exclude={"count", "dtype"}, mode="json"
    )
    return {f"engine.{key}": value for key, value in section.items()}


def check_engine(config: Config) -> None:
    """Raises `ConfigError` unless the interpreter of a server is there."""
    if config.engine.kind != "embedded":
        from midflight.run.engine.server_process import check_interpreter

        check_interpreter(config.engine)


def check_sizes(config: Config, *, trains: bool = True) -> None:
    """Raises `ConfigError` unless the run fits this machine. On a cluster, `check_places` checks
    the machines. `trains` is true if our trainer is a part.
    """
    from midflight.run.places.fit import misfits, this_hardware

    if config.cluster.kind != "local" and config.cluster.address != "start":
        return
    problems = [*misfits(config, this_hardware(), trains=trains)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_places(config: Config) -> None:
    """Raises `ConfigError` unless the run's places can be had. Every machine of a cluster is asked.
    Nothing is started, and the cluster stays connected.
    """
    if config.cluster.kind == "ray":
        from midflight.run.launcher.shutdown import main_task
        from midflight.run.places.checks import check_cluster
        from midflight.run.places.ray import connect

        cluster = connect(config)
        if main_task(check_cluster(cluster, config, say=to_terminal)) != 0:
            raise KeyboardInterrupt


def check_new(folder: Path, *, making: str = "a model") -> None:
    """Raises `ConfigError` unless something may be made in the folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"making {making} in {str(folder)!r}: it exists and is not empty; choose another folder"
        )


def preflight(
    config: Config, *, objects: bytes = given.NOTHING, meanwhile: Callable[[], None] = lambda: None
) -> Findings:
    """Runs the checks that need the machine and the user's code. Raises `ConfigError` with all
    faults.

    They run in a process of their own, because this one does without torch and without the user's
    modules. Waits for that process as long as it moves, and reports the wait; `meanwhile` is called
    beside it. `objects` are the objects that a Python program gives to its run, packed.
    """
    agent = agent_of(config.environment)
    kind = config.objective.kind
    what = f"trying the configuration (the agent is {agent!r}, objective.kind is {kind!r})"
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ.pop(TOKEN_VARIABLE, None)
    answer = _answer(
        "preflight",
        TrialWait(what, config.run.stall_seconds),
        given=objects + config.model_dump_json().encode(),
        environ=environ,
        meanwhile=meanwhile,
    )
    found = msgspec.json.decode(answer, type=Findings)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return found


def proofs(
    model: Path, max_context: int, *, stall_seconds: float = RunSection().stall_seconds
) -> list[tuple[bool, str]]:
    """Returns whether trainer, embedded engine and export compute the same as the model, each with
    a line about it. Raises `ConfigError` if the folder is not a model. Waits for a process that
    tries them as long as that moves, and reports the wait.
    """
    put_back_at(model)
    model = model_folder(model)
    patience = TrialWait(f"checking the model in {str(model)!r}", stall_seconds)
    answer = _answer(
        "proofs",
        patience,
        str(model),
        str(max_context),
        environ={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    found = msgspec.json.decode(answer, type=list[tuple[bool, str]] | str)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def measured(config: Config) -> ModelMeasurements:
    """Measures how the model of a configuration answers its tasks, and how quickly engine and
    trainer compute here, each with half of the cores. Raises `ConfigError` if the model cannot be
    asked. Waits for a process that tries it as long as that moves, and reports the wait.
    """
    patience = TrialWait(
        f"measuring the model in {str(config.model.path)!r}", config.run.stall_seconds
    )
    threads = str(max(1, own_cores() // 2))
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": threads,
    }
    answer = _answer(
        "measure", patience, threads, given=config.model_dump_json().encode(), environ=environ
    )
    found = msgspec.json.decode(answer, type=ModelMeasurements | str)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _answer(
    module: str,
    patience: TrialWait,
    *words: str,
    environ: Mapping[str, str],
    given: bytes = b"",
    meanwhile: Callable[[], None] = lambda: None,
) -> bytes:
    """Runs a module of the launcher in a process of its own, and returns its answer."""
    command = [sys.executable, "-m", f"midflight.run.launcher.{module}", *words]
    try:
        return answer_of(command, patience, given=given, environ=environ, meanwhile=meanwhile)
    except TrialFailed as failed:
        raise ConfigError(f"{patience.what} {failed}") from failed


def check_folder(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool,
    trains: bool = True,
    gives_rows: bool = False,
) -> None:
    """Raises `ConfigError` unless the command may use the folder, see `check_run_folder`. Changes
    nothing, except that it puts back a run that was set aside there.
    """
    put_back_at(Path(config.run.folder), resume=resume)
    check_run_folder(
        config, resume=resume, overwrite=overwrite, trains=trains, gives_rows=gives_rows
    )
    if resume:
        check_same_model(config)
