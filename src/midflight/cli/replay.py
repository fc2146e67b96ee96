"""`midflight replay`: a recorded step made again, packed for a colleague, or explained token by
token.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midflight.cli.options import Debug
from midflight.errors import ConfigError

if TYPE_CHECKING:
    from midflight.run.replay.step import ReplayedStep


def replay(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run, or a file of --bundle.", metavar="RUN")
    ],
    step: Annotated[
        int | None,
        typer.Option(help="Make this step again; default: that of the bundle.", min=1),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Write the step with what it needs into one file, and make nothing.",
            metavar="FILE",
        ),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option(help="Whether the weights are in the bundle, or only the path to them."),
    ] = True,
    explain: Annotated[
        str | None,
        typer.Option(
            help="Show what the loss did with one token: row of the batch, place in the row.",
            metavar="ROW:PLACE",
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(
            help="Run the agent of this rollout again, on the answers that were recorded.",
            metavar="ID",
        ),
    ] = None,
    decisions: Annotated[
        bool,
        typer.Option(
            "--decisions",
            help="Apply the run's events to the books again, and say where these decide otherwise.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="Where the step is made.")] = "cpu",
    debug: Debug = False,
) -> int:
    """Makes a recorded step again and compares it; 1 if it comes to something else."""
    from midflight.archive.runs import open_run
    from midflight.cli.put_back import put_back_at
    from midflight.run.replay.bundle import opened, write_bundle

    if run.is_file():
        if bundle is not None or decisions or rollout is not None:
            raise ConfigError(
                f"{run} is a bundle, which has one step and no store; --bundle, --decisions and "
                "--rollout want the folder of a run."
            )
        with opened(run) as (folder, packed):
            return _replay(folder, packed if step is None else step, explain, device)
    put_back_at(run)
    open_run(run)
    if decisions:
        return _decide_again(run)
    if rollout is not None:
        return _replay_rollout(run, rollout)
    if step is None:
        raise ConfigError("say which step to make again: --step N; `midflight samples` names some.")
    if bundle is None:
        return _replay(run, step, explain, device)
    size = write_bundle(run, step, bundle, with_weights=weights)
    typer.echo(f"wrote {bundle} ({size / 2**20:.1f} MB); make the step: midflight replay {bundle}")
    return 0


def _replay_rollout(run: Path, text: str) -> int:
    from midflight.archive.store_reader import rollout_key
    from midflight.run.replay.rollout import replay_rollout

    replayed = replay_rollout(run, rollout_key(text))
    recorded = replayed.recorded
    typer.echo(
        f"rollout {text}: {replayed.num_given} of {len(recorded.turns)} recorded answers were asked "
        f"for again; reward {recorded.reward} then, {replayed.made.reward} now"
    )
    if replayed.other_prompt:
        typer.echo(f"the agent asked something else, which ends: {replayed.other_prompt!r}")
    elif replayed.made.error:
        typer.echo(f"it failed: {replayed.made.error}")
    return 0 if replayed.holds else 1


def _decide_again(run: Path) -> int:
    from midflight.run.replay.decisions import decide_again

    found = decide_again(run)
    for one in found.different:
        typer.echo(f"event {one.event}: {one.what}")
    differing = len(found.different)
    typer.echo(
        f"{found.num_admissions:,} starts of groups, {found.num_groups:,} ends and "
        f"{found.num_leases:,} batches were decided again; {differing:,} otherwise"
    )
    if found.num_unrecorded:
        typer.echo(
            f"note: by what {found.num_unrecorded:,} groups were started is not recorded: an older "
            "Midflight ran them."
        )
    return 1 if differing else 0


def _replay(folder: Path, step: int, explain: str | None, device: str) -> int:
    from midflight.run.replay.bundle import batches_of
    from midflight.run.replay.step import replay_step

    replayed = replay_step(
        folder, step, batches_of, device=device, say=lambda text: typer.echo(text, err=True)
    )
    _print(replayed)
    if explain is not None:
        _explain(folder, replayed, explain)
    return 0 if replayed.holds else 1


def _print(replayed: "ReplayedStep") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "recorded", "made again", "", box=None)
    for one in replayed.comparisons:
        table.add_row(one.what, one.recorded, one.replayed, one.verdict)
    console = Console()
    console.print(f"step {replayed.line.step}, which made version {replayed.line.version}")
    console.print(table)


def _explain(folder: Path, replayed: "ReplayedStep", text: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from midflight.run.replay.explain import explain, place_of
    from midflight.text.tokenizer import Tokenizer

    token = place_of(text, replayed.batch)
    table = Table("", "", box=None, show_header=False)
    for name, value in explain(replayed, token, Tokenizer.load(folder / "start")):
        table.add_row(name, Text(value))
    Console().print(table)
