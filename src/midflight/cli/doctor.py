"""`midflight doctor`: the findings of all checks before a run, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midflight.cli.options import Debug

if TYPE_CHECKING:
    from midflight.run.launcher.checks.check import Finding


def doctor(
    asked: Annotated[
        Path | None,
        typer.Argument(
            help="TOML file of a run, or folder of a model or a run, or GGUF file.",
            metavar="[CONFIG]",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override an option.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help=(
                "Try every path on this device, such as cuda or cpu, in place of the table. It "
                "takes about ten minutes."
            ),
        ),
    ] = None,
    report: Annotated[
        Path, typer.Option(help="With --device: where the report goes.", metavar="DIR")
    ] = Path(),
    debug: Debug = False,
) -> int:
    """Looks at machine, engines, packages, limits, and a configuration or model: what there is,
    what is wrong, what to do about it. With --device it tries what a device can do.
    """
    if device is not None:
        return _tried(device, report, asked, overrides or [])
    from midflight.cli.examine import examine
    from midflight.cli.put_back import put_back_at
    from midflight.run.launcher.checks.check import Severity

    if asked is not None:
        put_back_at(asked)
    found = examine(asked, overrides or [])
    _show(found)
    wrong = sum(finding.severity is Severity.ERROR for finding in found)
    if not wrong:
        typer.echo("a run can work here")
        return 0
    plural = "s" if wrong > 1 else ""
    typer.echo(f"{wrong} problem{plural}: a run could not work")
    return 1


def _tried(device: str, folder: Path, asked: Path | None, overrides: Sequence[str]) -> int:
    """Tries a device and writes the report. Status 1 if anything failed."""
    from midflight.errors import ConfigError
    from midflight.run.device_check.check import check_device
    from midflight.run.device_check.report import TrialOutcome, write_report

    if asked is not None or overrides:
        given = "--set" if asked is None else str(asked)
        raise ConfigError(
            f"{given} is of a run, and --device looks at a device with models of its own; leave one "
            "of the two out."
        )
    found = check_device(device, say=typer.echo)
    as_json, as_page = write_report(found, folder)
    failed = found.trials(TrialOutcome.FAILED)
    for trial in failed:
        typer.echo(f"failed: {trial.what}: {trial.line}")
    typer.echo(f"{found.verdict}; {as_page} and {as_json} say all of it")
    return 1 if failed else 0


def _show(found: Sequence[Finding]) -> None:
    """Prints a table. The remedy is below the finding, because a terminal may have 80 columns."""
    from rich import box, console, table, text

    drawn = table.Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(3):
        drawn.add_column(overflow="fold")
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in found:
        mark = finding.severity.value
        said = text.Text(finding.found)
        if finding.remedy:
            said.append(f"\n→ {finding.remedy}", style="dim" if mark == "ok" else "")
        drawn.add_row(text.Text(mark, styles[mark]), text.Text(finding.what), said)
    console.Console().print(drawn)
