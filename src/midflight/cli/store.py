"""The commands that read a run's store: `midflight samples`, `ledger` and `export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from midflight.cli.options import Debug

if TYPE_CHECKING:
    from midflight.types import Kind

RunFolder = Annotated[
    Path, typer.Argument(help="Folder of a run, which may be under way.", metavar="RUN")
]
Steps = Annotated[
    str | None,
    typer.Option(
        "--steps",
        metavar="A-B",
        help="Of groups that these steps trained on: one step, or from A to B.",
        show_default=False,
    ),
]
HeldOut = Annotated[
    bool,
    typer.Option(
        "--evaluation", help="Of held-out tasks, in place of those that the run learns from."
    ),
]

MISTAKES_SHOWN = 20


def samples(
    run: RunFolder,
    rollout: Annotated[
        str | None,
        typer.Option(
            "--rollout",
            metavar="KEY",
            help="This one: epoch-position-attempt-sample.",
            show_default=False,
        ),
    ] = None,
    number: Annotated[
        int, typer.Option("--number", "-n", help="Conversations to print.", min=1)
    ] = 3,
    steps: Steps = None,
    best: Annotated[bool, typer.Option("--best", help="Those of highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those of lowest reward first.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Those without a reward.")] = False,
    source: Annotated[
        str, typer.Option("--source", help="Of tasks of this source.", show_default=False)
    ] = "",
    evaluation: HeldOut = False,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Long messages whole; they are cut in the middle otherwise."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Prints conversations of a run, with their rewards and what became of them; the newest unless
    told otherwise.
    """
    from midflight.archive.conversation import conversation_of
    from midflight.archive.samples import SampleChoice, chosen, in_words
    from midflight.archive.store_reader import copy_in_words, rollout_key
    from midflight.cli.put_back import put_back_at
    from midflight.errors import StoreCorrupt

    put_back_at(run)
    kind = _kind(evaluation)
    choice = SampleChoice(
        number=number,
        kind=kind,
        versions=_versions(run, steps, kind),
        source=source,
        best=best,
        worst=worst,
        failed=failed,
    )
    if (said := copy_in_words(run)) is not None:
        typer.echo(said)
    keys = chosen(run, choice) if rollout is None else [rollout_key(rollout)]
    for key in keys:
        try:
            shown = in_words(conversation_of(run, key, with_advantages=False), whole=whole)
        except StoreCorrupt as error:
            shown = f"{key}: {error}"
        typer.echo(shown)
    return 0


def ledger(
    run: RunFolder,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Compute all digests of the run again, and name what was changed since.",
        ),
    ] = False,
    digest: Annotated[
        str | None,
        typer.Option(
            help="A digest that you kept, as the run printed it at its end: the run must have it.",
            metavar="HEX",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights",
            help="Compare kept weights with the digests, and compute log-probabilities again.",
        ),
    ] = False,
    witness: Annotated[
        int,
        typer.Option(
            help="Make the newest step again, and look at so many rollouts' gradients.",
            metavar="N",
            min=0,
        ),
    ] = 0,
    debug: Debug = False,
) -> int:
    """Says where every token of a run went; 1 if they do not add up."""
    from rich.console import Console

    from midflight.archive.ledger import ledger_of
    from midflight.archive.samples import ledger_table
    from midflight.archive.store_reader import copy_in_words
    from midflight.cli.put_back import put_back_at

    put_back_at(run)
    if prove or digest is not None or weights or witness:
        proven = [_prove(run, digest)]
        if weights:
            proven.append(_prove_weights(run))
        if witness:
            proven.append(_witness(run, witness))
        return max(proven)
    found = ledger_of(run)
    Console().print(ledger_table(found))
    if (said := copy_in_words(run)) is not None:
        typer.echo(said)
    typer.echo(found.balance)
    return 0 if found.balanced else 1


def _prove(run: Path, digest: str | None) -> int:
    from midflight.archive.prove.proof import prove

    proof = prove(run, digest=digest)
    for mistake in proof.mistakes[:MISTAKES_SHOWN]:
        typer.echo(f"wrong: {mistake}")
    left = len(proof.mistakes) - MISTAKES_SHOWN
    if left > 0:
        typer.echo(f"wrong: and {left} more")
    for note in proof.notes:
        typer.echo(f"note: {note}")
    if proof.holds:
        typer.echo(
            f"proven: {proof.num_rollouts:,} rollouts and {proof.num_steps:,} steps have their "
            "digests"
        )
    if proof.digest:
        typer.echo(f"digest of the last step: {proof.digest}")
    return 0 if proof.holds else 1


def _prove_weights(run: Path) -> int:
    from midflight.run.replay.weights import prove_weights

    proof = prove_weights(run)
    for mistake in proof.wrong:
        typer.echo(f"wrong: {mistake}")
    if proof.num_compared:
        typer.echo(
            f"proven: {proof.num_compared} kept sets of weights are those that the steps made"
        )
    if proof.worst is None:
        kept = ", ".join(map(str, proof.kept)) or "none"
        typer.echo(
            f"note: no answer is of versions whose weights are kept ({kept}); raise "
            "trainer.keep_checkpoints and lower trainer.checkpoint_every for the next run."
        )
        return 0 if proof.holds else 1
    if proof.num_mixed:
        typer.echo(
            f"note: {proof.num_mixed} answers began with keys of older versions, and their engine "
            "did not say which: they are not judged."
        )
    worst = proof.worst
    said = "proven" if worst.nats <= proof.bound else "wrong"
    typer.echo(
        f"{said}: {proof.num_tokens:,} tokens of {proof.num_answers} answers, computed again by "
        f"transformers, differ by {worst.nats:.1e} nats at most (bound {proof.bound:g}): token "
        f"{worst.token} of {worst.rollout}, version {worst.version}, recorded "
        f"{worst.recorded:.6f}, computed {worst.computed:.6f}"
    )
    return 0 if proof.holds else 1


def _witness(run: Path, number: int) -> int:
    from midflight.run.replay.witness import witnesses

    replayed, found = witnesses(run, number)
    for one in found:
        if not one.holds:
            typer.echo(
                f"wrong: rollout {one.number} of step {replayed.line.step} has a gradient of "
                f"{one.gradient:.3e}, and the books say that it "
                f"{'has' if one.expected else 'has not'} one"
            )
    with_gradient = sum(one.gradient > 0 for one in found)
    holds = all(one.holds for one in found)
    if holds:
        typer.echo(
            f"proven: of {len(found)} rollouts of step {replayed.line.step}, {with_gradient} had a "
            "gradient, exactly those that the books say"
        )
    return 0 if holds else 1


def export(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File to write, JSON lines; default: RUN-FORMAT.jsonl here.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        Literal["sft", "dpo", "jsonl"],
        typer.Option("--format", help="Conversations, pairs, or all that is known."),
    ] = "sft",
    min_reward: Annotated[
        float | None,
        typer.Option(help="Of a conversation, or of the better of a pair.", show_default=False),
    ] = None,
    min_margin: Annotated[
        float, typer.Option(help="By which the better of a pair must be better.", min=0.0)
    ] = 0.0,
    steps: Steps = None,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--source", help="Only of this source; may be given again.", show_default=False
        ),
    ] = None,
    evaluation: HeldOut = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it is there.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Writes chosen rollouts as a data set that `datasets` loads. Held-out tasks are in it with
    `--evaluation` alone, and then nothing else.
    """
    from midflight.archive.export import ExportChoice, ExportFormat, write_export
    from midflight.cli.put_back import put_back_at
    from midflight.errors import ConfigError

    put_back_at(run)
    out = out or Path(f"{run.resolve().name}-{form}.jsonl")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} is there already; give another file, or --overwrite.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder; make it, or give a file in another.")
    kind = _kind(evaluation)
    choice = ExportChoice(
        kind=kind,
        min_reward=min_reward,
        versions=_versions(run, steps, kind),
        sources=tuple(sources or ()),
        min_margin=min_margin,
    )
    written = write_export(run, out, ExportFormat(form), choice)
    typer.echo(f"{out}: {written.num_lines} lines of {form}")
    if written.unread:
        typer.echo(f"{len(written.unread)} rollouts are left out. The first: {written.unread[0]}")
    return 0


def _kind(evaluation: bool) -> "Kind":
    from midflight.types import Kind

    return Kind.EVALUATION if evaluation else Kind.TRAINING


def _versions(run: Path, steps: str | None, kind: "Kind") -> tuple[int, int] | None:
    """The first and the last version that the steps made, or that were evaluated after them."""
    if steps is None:
        return None
    from midflight.archive.groups import versions_of
    from midflight.errors import ConfigError

    first, _, last = steps.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ConfigError(
            f"--steps is {steps!r}; write one step, such as 7, or the first and the last, such as "
            "7-12."
        )
    return versions_of(run, int(first), int(last or first), kind)
