"""The pages on Python and on other libraries: every block of Python runs, one after the other, and every block of TOML is a configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.real.processes import Command

from midflight.config import load_config

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODEL = "--set model.hidden_size=32 --set model.intermediate_size=64 --set model.num_layers=1 --set model.num_heads=2 --set model.num_kv_heads=1"


def blocks(page: str, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall((DOCS / page).read_text()) if kind == language]


@pytest.mark.parametrize("page", ["python.md", "from-trl.md"])
def test_the_python_of_a_page_runs(tmp_path: Path, page: str) -> None:
    for command in (Command("new-model", "models/small", *MODEL.split(), folder=tmp_path), None):
        if command is None:
            (tmp_path / "program.py").write_text("\n".join(blocks(page, "python")))
            command = Command(folder=tmp_path, module="program")
        try:
            assert command.wait(110) == 0, command.said
        finally:
            command.end()


def test_the_toml_of_a_page_is_a_configuration(tmp_path: Path) -> None:
    for number, block in enumerate(blocks("from-verl.md", "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        assert load_config(file).weights.every == 2
