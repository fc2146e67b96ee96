"""The command line, from `sys.argv` to an exit status. The commands themselves are in
`run.launcher.launch`, which is imported when one runs.
"""

import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.main import get_command

from midflight.cli import (
    completion,
    doctor,
    fetch,
    joining,
    replay,
    runs,
    store,
    trace_and_report,
    view,
)
from midflight.cli.examples import add_examples
from midflight.cli.options import (
    ConfigFile,
    Debug,
    Device,
    Folder,
    Host,
    Kind,
    LogFormat,
    MaxContext,
    MaxRunning,
    Model,
    Name,
    Overrides,
    Overwrite,
    Port,
    Token,
    Url,
    Urls,
)
from midflight.errors import Blame, ConfigError, MidflightError, disk_full
from midflight.version import described

if TYPE_CHECKING:
    from midflight.config import Config
    from midflight.run.launcher.checks.check import Caller

FAILED = 1
WRONG_CONFIG = 2
INTERRUPTED = 130
"""Exit statuses beside 0. Wrong usage has that of a wrong configuration."""

_SHARED = Path(sysconfig.get_path("data")) / "share" / "midflight"
"""The folder in which a wheel puts the files that the pages mention. A checkout has them in its
root.
"""

app = typer.Typer(
    name="midflight",
    help="Asynchronous reinforcement learning for language-model agents.",
    epilog=f"Pages, configurations and examples: {_SHARED}" if _SHARED.is_dir() else None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, and end.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run's folder.")
    ] = False,
    overwrite: Overwrite = False,
    folder: Folder = None,
    samples: Annotated[bool, typer.Option("--samples", help="Show the last rollout.")] = False,
    rollouts_from: Annotated[
        Path | None,
        typer.Option(
            help="Generate nothing: make the steps on the rollouts that this run recorded.",
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help=(
                "With --dry-run: plan for so many GPUs, in all machines together, whatever this "
                "machine has."
            ),
            min=1,
            metavar="NUMBER",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The kind of these GPUs, such as h100.", metavar="KIND", show_default=False
        ),
    ] = None,
    log_format: LogFormat = None,
    debug: Debug = False,
) -> int:
    """Trains a model: engines generate while the trainer takes steps."""
    from midflight.cli import configurations
    from midflight.cli.put_back import put_back_at
    from midflight.config.gpus import described_gpus
    from midflight.run.launcher.checks.check import Plan

    described = described_gpus(gpus, gpu, dry_run=dry_run)
    put_back_at(config, resume=resume)
    if rollouts_from is not None:
        if dry_run or resume or overwrite:
            raise ConfigError(
                "--rollouts-from makes a run anew, in a folder of its own: leave out --dry-run, "
                "--resume and --overwrite."
            )
        loaded = configurations.config_of_file(config, overrides or [], folder)
        return _train_on_rollouts(loaded, rollouts_from)
    plan = Plan(
        configurations.config_of_file(
            config,
            [*(overrides or []), *_observed(log_format, samples=samples)],
            folder,
            stored=resume,
        ),
        caller=_caller(dry_run=dry_run, plans=described is not None),
        resume=resume,
        overwrite=overwrite,
        gpus=described,
    )
    if dry_run:
        from midflight.cli.dry_run import print_report

        print_report(plan.config, configurations.checked(plan), gpus=described)
        return 0
    findings = configurations.checked(plan, meanwhile=lambda: _begin(plan.config))
    from midflight.run.launcher import launch

    return launch.train(plan.config, resume=resume, overwrite=overwrite, found=findings)


def _caller(*, dry_run: bool, plans: bool) -> "Caller":
    from midflight.run.launcher.checks.check import Caller

    if plans:
        return Caller.PLAN
    return Caller.DRY_RUN if dry_run else Caller.START


def _train_on_rollouts(config: "Config", source: Path) -> int:
    from midflight.run.replay.training import train_on_rollouts

    model = train_on_rollouts(config, source, say=typer.echo)
    typer.echo(f"wrote {model}; compare: midflight compare {source} {config.run.folder}")
    return 0


@app.command()
def rollouts(
    config: ConfigFile,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    folder: Folder = None,
    control_token: Token = None,
    log_format: LogFormat = None,
    debug: Debug = False,
) -> int:
    """Runs engines and rollouts for a trainer of your own, which draws batches and publishes
    weights over HTTP.
    """
    from midflight.cli import configurations
    from midflight.cli.put_back import put_back_at
    from midflight.run.launcher.checks.check import Plan
    from midflight.run.parts import Purpose

    put_back_at(config)
    plan = Plan(
        configurations.config_of_file(config, [*(overrides or []), *_observed(log_format)], folder),
        purpose=Purpose.ROLLOUTS,
        overwrite=overwrite,
    )
    findings = configurations.checked(plan, meanwhile=lambda: _begin(plan.config))
    from midflight.run.launcher import launch

    return launch.rollouts(plan.config, overwrite=overwrite, found=findings, token=control_token)


@app.command()
def serve(
    model: Model,
    engine: Kind = None,
    engine_urls: Urls = None,
    engines: Annotated[int, typer.Option(help="Engine processes.", min=1)] = 1,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    max_running: MaxRunning = None,
    max_context: MaxContext = None,
    device: Device = None,
    name: Name = None,
    control_token: Token = None,
    overrides: Overrides = None,
    log_format: LogFormat = None,
    debug: Debug = False,
) -> int:
    """Serves a model over the OpenAI API: engines, ours or vLLM or SGLang servers, and gateway, no
    trainer.
    """
    from midflight.cli import configurations

    given = _given(max_running, max_context, device, name, engine, engine_urls or [])
    folder = f"runs/serve-{port or os.getpid()}"
    threads = None
    if engine in (None, "embedded"):  # they share all cores, of which no trainer wants any
        threads = max(1, (os.cpu_count() or 1) // engines)
    given = {
        "run.folder": folder,
        "engine.count": engines,
        "engine.threads": threads,
        "gateway.port": port,
        "gateway.host": host,
        **given,
    }
    config = configurations.config_of_model(
        model, given, [*(overrides or []), *_observed(log_format)]
    )
    from midflight.run.launcher import launch

    return launch.serve(config, token=control_token)


@app.command()
def engine(
    model: Model,
    kind: Kind = None,
    engine_url: Url = None,
    port: Port = 8001,
    host: Host = "127.0.0.1",
    max_running: MaxRunning = None,
    max_context: MaxContext = None,
    device: Device = None,
    name: Name = None,
    control_token: Token = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Serves a model with one engine alone: native generation and its control plane."""
    from midflight.cli import configurations

    urls = [] if engine_url is None else [engine_url]
    given = _given(max_running, max_context, device, name, kind, urls)
    config = configurations.config_of_model(model, given, overrides or [])
    from midflight.run.launcher import launch

    return launch.engine(config, host=host, port=port, token=control_token)


def _begin(config: "Config") -> None:
    from midflight.run.launcher import launch

    launch.begin(config)


def _observed(log_format: str | None, *, samples: bool = False) -> list[str]:
    """The overrides that the options `--log-format` and `--samples` stand for."""
    overrides: list[str] = []
    if log_format is not None:
        overrides.append(f"observe.log_format={log_format}")
    if samples:
        overrides.append("observe.samples=true")
    return overrides


def _given(
    max_running: int | None,
    max_context: int | None,
    device: str | None,
    name: str | None,
    kind: str | None,
    urls: Sequence[str],
) -> Mapping[str, object]:
    """The options of engines that `serve` and `engine` have, by the keys of the configuration."""
    return {
        "engine.max_running": max_running,
        "model.max_context": max_context,
        "engine.device": device,
        "model.name": name,
        "engine.kind": kind,
        "engine.urls": json.dumps(urls) if urls else None,
    }


@app.command()
def evaluate(
    model: Annotated[
        Path, typer.Argument(help="Hugging Face model folder, or a GGUF file.", metavar="MODEL_DIR")
    ],
    config: Annotated[
        Path,
        typer.Option(
            "--config", help="TOML file whose held-out tasks are asked.", metavar="CONFIG"
        ),
    ],
    overrides: Overrides = None,
    folder: Folder = None,
    debug: Debug = False,
) -> int:
    """Scores a model folder on the held-out tasks of a configuration."""
    from midflight.cli import configurations
    from midflight.models.gguf_folders import model_folder

    model = model_folder(model)
    checked_config = configurations.config_of_evaluation(config, overrides or [], folder, model)
    from midflight.run.launcher import launch

    return launch.evaluate(checked_config, model)


@app.command()
def rollback(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="FOLDER")],
    to: Annotated[
        int,
        typer.Option(
            "--to", help="Version of the checkpoint to go back to.", metavar="VERSION", min=0
        ),
    ],
    debug: Debug = False,
) -> int:
    """Goes back to an older checkpoint: what was trained since then waits to be trained again."""
    from midflight.cli import configurations

    config = configurations.config_of_folder(folder)
    from midflight.run.launcher import launch

    return launch.rollback(config, to=to)


@app.command("new-model")
def new_model(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", metavar="DIR")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Makes a small model with random weights and a byte tokenizer, to try the other commands
    with.
    """
    from midflight.cli import configurations

    config = configurations.config_of_file(None, overrides or [], None)
    configurations.check_served(config)
    configurations.check_new(folder)
    from midflight.run.launcher import launch

    status = launch.new_model(config, folder)
    if status == 0:
        typer.echo(f"made {folder}; serve it: midflight serve --model {folder}")
    return status


@app.command("check-model")
def check_model(
    folder: Annotated[
        Path, typer.Argument(help="Hugging Face model folder, or a GGUF file.", metavar="DIR")
    ],
    max_context: Annotated[
        int, typer.Option(help="Longest row of a run, in tokens.", min=2)
    ] = 4096,
    debug: Debug = False,
) -> int:
    """Says whether trainer, embedded engine and export compute what the model computes: right,
    right but slower, or refused and why.
    """
    from midflight.cli.put_back import put_back_at
    from midflight.models.gguf_folders import model_folder
    from midflight.run.launcher.checks.model import prove

    put_back_at(folder)
    found = prove(model_folder(folder), max_context)
    for _, line in found:
        typer.echo(line)
    are_right = all(right for right, _ in found)
    return 0 if are_right else FAILED


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", metavar="DIR")],
    model: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Your own model, a Hugging Face folder or a GGUF file: it is measured, and the "
                "numbers fit it."
            )
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help=(
                "With --model: a file of tasks, or a dataset of reasoning-gym, in place of the "
                "project's own."
            )
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="With --model: what is asked of a task, as environment.sources.prompt.",
            metavar="FORMAT",
        ),
    ] = None,
    answer: Annotated[
        str,
        typer.Option(
            help="With --tasks FILE: the column with the expected answer.", metavar="COLUMN"
        ),
    ] = "answer",
    lora: Annotated[
        int | None,
        typer.Option(
            help="With --model: train adapters of this rank in place of all weights.", min=1
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Makes a project to start one's own from: data, rewards, an environment, a test, and a
    configuration that trains as it is.
    """
    from midflight.cli import configurations
    from midflight.cli.fitted_project import Request, write_fitted
    from midflight.cli.project import write_project

    configurations.check_new(folder, making="a project")
    if model is not None:
        files = write_fitted(Request(folder, model, tasks, prompt, answer, lora), say=typer.echo)
        typer.echo(
            f"made {folder} with {', '.join(files)}; what it means: cd {folder} && midflight train "
            "run.toml --dry-run"
        )
        return 0
    if tasks is not None or prompt is not None or lora is not None:
        raise ConfigError(
            "--tasks, --prompt and --lora say what a model of yours is trained on; give it too: "
            "--model DIR"
        )
    files = write_project(folder)
    typer.echo(
        f"made {folder} with {', '.join(files)}; train it: cd {folder} && midflight train run.toml"
    )
    return 0


app.command("fetch-model")(fetch.fetch_model)
app.command("join")(joining.join)
app.command("runs")(runs.runs)
app.command("compare")(runs.compare)
app.command("view")(view.view)
for command in (store.samples, store.ledger, store.export):
    app.command()(command)
app.command("replay")(replay.replay)
app.command("doctor")(doctor.doctor)
app.command("trace")(trace_and_report.trace)
app.command("report")(trace_and_report.report)

app.command("completion", help=completion.HOW)(completion.completion)
add_examples(app)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if show:
        typer.echo(f"midflight {described()}")
        raise typer.Exit


# --- Exit statuses --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Errors meant for users become one clear message; their traceback is shown
    with `--debug`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    completion.begin()
    try:
        _check_gone(given)
        _check_overrides(given)
        return get_command(app).main(args=given, prog_name="midflight", standalone_mode=False) or 0
    except MidflightError as error:
        return _report(error, debug="--debug" in given)
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if (full := disk_full(error)) is not None:
            return _report(full, debug="--debug" in given)
        return _usage(error)


GONE = {
    "front": "nginx gives the gateways of a run one address, with ops/nginx/midflight.conf and the "
    "addresses that `ops/nginx/gateways.sh RUN` writes (docs/sessions.md)",
}
"""Commands that are gone, each with what to use in its place."""


def _check_gone(given: Sequence[str]) -> None:
    if given and given[0] in GONE:
        raise ConfigError(f"`midflight {given[0]}` is gone: {GONE[given[0]]}.")


def _check_overrides(given: Sequence[str]) -> None:
    """`ConfigError` for an override with a space, such as `--set run.steps 5`. Without this, the
    error would be about the second of two arguments.
    """
    for place, option in enumerate(given):
        if option != "--set":
            continue
        following = given[place + 1 : place + 4]
        words = list(takewhile(lambda word: not word.startswith("-"), following))
        values = [word.removeprefix("=") for word in words[1:] if word not in ("", "=")]
        if values and "=" not in words[0]:
            whole = f"{words[0]}={values[0]}"
            raise ConfigError(
                f"--set {' '.join(words)}: an override is KEY=VALUE, with = and without a space; "
                f"write --set {whole}"
            )


def _report(error: MidflightError, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    sys.stderr.write(f"midflight: {error}\n")
    return WRONG_CONFIG if error.blame is Blame.CONFIG else FAILED


def _usage(error: Exception) -> int:
    """Shows the fault of an option, with its help. Any other error is a bug, and is raised with its
    traceback.
    """
    show = getattr(error, "show", None)
    status = getattr(error, "exit_code", None)
    if show is None or not isinstance(status, int):
        raise error
    show()
    return status
