"""The command `completion`: the script by which a shell completes commands, options and paths."""

import os
from enum import StrEnum
from typing import Annotated

import typer


class ShellName(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


VARIABLE = "_MIDFLIGHT_COMPLETE"
"""The variable that a shell sets when it asks for completions."""
HOW = """Prints the completion of a shell.

bash: midflight completion bash > ~/.local/share/bash-completion/completions/midflight

zsh: midflight completion zsh > a file named _midflight in a folder of $fpath

fish: midflight completion fish > ~/.config/fish/completions/midflight.fish
"""


def completion(shell: Annotated[ShellName, typer.Argument(help="bash, zsh or fish.")]) -> int:
    from typer.completion import get_completion_script  # pyright: ignore[reportPrivateImportUsage]

    typer.echo(
        get_completion_script(prog_name="midflight", complete_var=VARIABLE, shell=shell.value)
    )
    return 0


def begin() -> None:
    """Lets the command line answer a shell that asks; nothing otherwise."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # pyright: ignore[reportPrivateImportUsage]

        completion_init()
