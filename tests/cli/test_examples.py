"""The example of each command."""

from __future__ import annotations

import shlex

import pytest
from typer.main import get_command

from midflight.cli import main
from midflight.cli.commands import app
from midflight.cli.examples import EXAMPLES

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_has_an_example() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_shown_by_the_help_and_accepted_by_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(EXAMPLES[name])
    assert words[:2] == ["midflight", name]
    assert main([name, "--help"]) == 0
    assert EXAMPLES[name] in " ".join(capsys.readouterr().out.split())
    assert COMMANDS[name].make_context(name, words[2:]).params


def test_a_command_that_is_gone_is_refused_by_its_name_with_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["front", "runs/demo", "--port", "8000"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("midflight: `midflight front` is gone: nginx gives") and "ops/nginx/gateways.sh RUN" in said
