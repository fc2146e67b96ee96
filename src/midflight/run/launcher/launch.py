"""Implements the commands that start processes. Each function returns an exit status.

The launcher never imports torch: all computation happens in child processes.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.observe.readable import heldout
from midflight.observe.status import Status
from midflight.observe.summary_table import summary_table
from midflight.observe.terminal import Terminal
from midflight.run.endpoint import ControlToken, control_token
from midflight.run.launcher import opening
from midflight.run.launcher.checks.check import Findings
from midflight.run.launcher.checks.folder import check_run_folder
from midflight.run.launcher.folder import CONFIG, kept, prepare, set_aside
from midflight.run.launcher.folder_lock import hold_folder
from midflight.run.launcher.permissions import close_store
from midflight.run.launcher.program import Program
from midflight.run.launcher.replaced_files import is_aside
from midflight.run.launcher.ring import Ring
from midflight.run.launcher.run import Run
from midflight.run.launcher.sentences import sentence, where_gateway
from midflight.run.launcher.shutdown import main_task
from midflight.run.parts import (
    Message,
    ModelReady,
    Progress,
    Purpose,
    Ready,
)
from midflight.trajectories.pairs import shard_folders, store_path
from midflight.types import Version
from midflight.wire.hosts import exposure, is_loopback


def as_json(config: Config) -> bool:
    return config.observe.log_format == "json"


def begin(config: Config, console: Console | None = None) -> None:
    """Says the first lines of `train` and `rollouts`, which do not repeat them. They are printed
    while the configuration is tried, which takes seconds.
    """
    Terminal(console, as_json=as_json(config)).say(opening.beginning(config))


def _begin_in(folder: Path, config: Config, *, resume: bool, say: Callable[[str], None]) -> None:
    """Makes the folder ready. A run that is there, and that `check_run_folder` lets this one replace,
    stays aside until this one's first step.
    """
    found = None if resume else kept(folder)
    if found is not None:
        set_aside(folder, config)
        say(
            f"{folder} holds {found}, which is deleted after the first step of this one; if this "
            "one ends before that, it is put back."
        )
    prepare(folder, config, resume=resume)
    if config.run.store_folder is not None:
        for gateway in (folder, *shard_folders(folder)):
            close_store(store_path(gateway, config.run.store_folder))


def train(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    found: Findings = Findings(),
    program: Program | None = None,
) -> int:
    """Trains a model. Ctrl-C ends it within five seconds, with everything written and nothing left
    running; `--resume` goes on from there.

    It works in any thread, and in a notebook. `found` is what the checks have found.
    """
    program = program or Program()
    folder = Path(config.run.folder)
    token = control_token(None)
    with (
        Terminal(program.console, as_json=as_json(config)) as terminal,
        hold_folder(folder, terminal.say, group=config.run.share_with_group) as lock,
    ):
        # again: while it was not held, another process may have used it
        check_run_folder(config, resume=resume, overwrite=overwrite, gives_rows=bool(program.rows))
        _begin_in(folder, config, resume=resume, say=terminal.say)
        for name, rows in program.rows.items():
            shutil.copyfile(rows, folder / name)
        terminal.say(opening.training(config, own_loss=found.own_loss))
        _say_notes(terminal, found)
        run = Run(
            config,
            terminal,
            token,
            lock,
            loss=opening.loss_lines(config, found.own_loss),
            program=program,
        )
        warn(terminal, config, anonymous=False)
        status = 1
        try:
            status = main_task(run.train(resume=resume), stop=program.stop)
        finally:
            summary = program.summary = run.conclude(finished=status == 0)
        terminal.say(summary_table(summary, run.status))
        if not is_aside(folder):
            made = [
                name
                for name in ("summary.json", "metrics.jsonl", "plot.png", "model/", "adapter/")
                if (folder / name).exists()
            ]
            terminal.say(f"{folder}: {', '.join(made)}")
        if summary.digest:  # on a line of its own, to be copied
            terminal.say(f"digest: {summary.digest}")
    return status


def rollouts(
    config: Config, *, overwrite: bool = False, found: Findings = Findings(), token: str | None
) -> int:
    """Runs engines, gateway and rollouts for the user's own trainer, until that has finished, or
    until Ctrl-C.
    """
    model = _model(config.model.path)
    chosen = control_token(token)
    folder = Path(config.run.folder)
    with (
        Terminal(as_json=as_json(config)) as terminal,
        hold_folder(folder, terminal.say, group=config.run.share_with_group) as lock,
    ):
        check_run_folder(config, resume=False, overwrite=overwrite, trains=False)
        _begin_in(folder, config, resume=False, say=terminal.say)
        terminal.say(opening.rolling_out(config))
        _say_notes(terminal, found)
        run = Run(config, terminal, chosen, lock)
        warn(terminal, config, anonymous=False)

        def hear(message: Message) -> None:
            if isinstance(message, Ready) and message.url is not None:
                announce(terminal, message.url, chosen)
            run.hear(message)

        status = 1
        try:
            status = main_task(run.roll_out(model, hear))
        finally:
            summary = run.conclude(finished=status == 0)
        terminal.say(summary_table(summary, run.status))
    return status


def _say_notes(terminal: Terminal, found: Findings) -> None:
    for note in found.notes:
        terminal.say(f"note: {note}")


def announce(terminal: Terminal, address: str, token: ControlToken) -> None:
    """Prints the address, and the token if it is new."""
    terminal.say(f"ready: {address}")
    if token.is_new:
        terminal.say(f"control token: {token.value}")


def warn(terminal: Terminal, config: Config, *, anonymous: bool) -> None:
    """Warns if others than the users of this machine can reach the gateway."""
    host = config.gateway.host
    if config.cluster.kind != "local" and is_loopback(host):
        host = "the gateway's machine"  # no other machine reaches its loopback
    warning = exposure(host, anonymous=anonymous)
    if warning is not None:
        terminal.say(warning)


def serve(config: Config, *, token: str | None) -> int:
    """Runs engines and gateway until Ctrl-C."""
    model = _model(config.model.path)
    chosen = control_token(token)
    with (
        Terminal(as_json=as_json(config)) as terminal,
        hold_folder(
            Path(config.run.folder), terminal.say, group=config.run.share_with_group
        ) as lock,
    ):
        terminal.say(opening.serving(config))
        warn(terminal, config, anonymous=True)

        def hear(message: Message) -> None:
            if isinstance(message, Ready) and message.url is not None:
                announce(terminal, f"{message.url}/v1", chosen)
            elif (said := sentence(message)) is not None:
                terminal.say(said)

        ring = Ring(config, on_message=hear, control_token=chosen.value, lock=lock, model=model)
        return main_task(ring.run(Purpose.SERVE))


def evaluate(config: Config, model: Path, *, program: Program | None = None) -> int:
    """Prints the held-out score of a model folder, by the same environment, seeds and engine as in
    training. `program` receives it too.
    """
    program = program or Program()
    with (
        Terminal(program.console, as_json=as_json(config)) as terminal,
        hold_folder(
            Path(config.run.folder), terminal.say, group=config.run.share_with_group
        ) as lock,
    ):
        section = config.model.model_copy(update={"path": model})
        terminal.say(opening.evaluating(config.model_copy(update={"model": section})))
        last = Status()

        def hear(message: Message) -> None:
            nonlocal last
            program.hear(message)
            if isinstance(message, Progress):
                last = message.status
                terminal.show(last)
            elif isinstance(message, Ready) and message.url is not None:
                # workers outside claim the rollouts
                terminal.say(where_gateway(message.url, Path(config.run.folder)))
            elif (said := sentence(message)) is not None:
                terminal.say(said)

        token = control_token(None).value
        objects = program.objects
        ring = Ring(
            config,
            on_message=hear,
            control_token=token,
            lock=lock,
            model=_model(model),
            objects=objects,
        )
        status = main_task(ring.run(Purpose.EVALUATE), stop=program.stop)
        for source in last.sources:
            terminal.say(f"{source.name}: {heldout(source, digits=4)}")
    return status


def _model(folder: Path | None) -> ModelReady:
    if folder is None:
        raise ConfigError("no model was given: pass --model DIR, a Hugging Face model folder.")
    return ModelReady(str(folder.resolve()), 0)


def engine(config: Config, *, host: str, port: int, token: str | None) -> int:
    """Runs one engine in this process until Ctrl-C. An engine that other machines can reach always
    has a token; on loopback it has one only if one is given.
    """
    from midflight.run.launcher.one_engine import serve_engine

    assert config.model.path is not None
    chosen = control_token(token)
    guard = None if chosen.is_new and is_loopback(host) else chosen
    with Terminal(as_json=as_json(config)) as terminal:
        terminal.say(opening.serving(config, logs=False))

        def ready(url: str) -> None:
            terminal.say(f"ready: {url}")
            if guard is not None and guard.is_new:
                terminal.say(f"control token: {guard.value}")

        def alarmed(text: str) -> None:
            terminal.say(f"alarm: {text}")

        return main_task(
            serve_engine(
                config,
                config.model.path,
                host=host,
                port=port,
                token=None if guard is None else guard.value,
                ready=ready,
                alarmed=alarmed,
            )
        )


def rollback(config: Config, *, to: Version) -> int:
    """Goes back to an older checkpoint of the run in the configuration's folder; `train --resume`
    goes on from there.
    """
    from midflight.run.trainer.rollback import roll_back

    folder = Path(config.run.folder)
    with (
        Terminal() as terminal,
        hold_folder(folder, terminal.say, group=config.run.share_with_group),
    ):
        groups = roll_back(folder, to, run=config.run.name, store_folder=config.run.store_folder)
        terminal.say(
            f"{folder} is back at version {to}: {groups} groups of tasks that were trained since "
            "then wait again. Go on by:"
        )
        terminal.say(f"midflight train {folder / CONFIG} --resume")
    return 0


def new_model(config: Config, folder: Path) -> int:
    """Writes a model with random weights, in this process."""
    from midflight.run.trainer.trainer_process import first_model

    first_model(config.model.model_copy(update={"path": None}), folder, seed=config.run.seed)
    return 0
