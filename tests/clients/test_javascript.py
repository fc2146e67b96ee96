"""The SDKs of npm, unmodified: a tool is called and its result is used, whole and streamed. The programs are in `javascript`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "javascript"
MODULES = os.environ.get("MIDFLIGHT_JAVASCRIPT")
SAID = "The tool said: sunny in Paris."


@pytest.mark.skipif(MODULES is None, reason="MIDFLIGHT_JAVASCRIPT names no folder with node_modules")
@pytest.mark.parametrize(
    ("program", "answers"),
    [("openai", ("chat", "responses")), ("anthropic", ("messages",)), ("ai", ("responses", "streamed", "chat"))],
)
def test_a_tool_is_called_and_its_result_is_used(program: str, answers: tuple[str, ...], scripted: str) -> None:
    assert MODULES is not None
    source = Path(MODULES) / f"{program}.mjs"  # modules are looked for beside a program
    source.write_text((PROGRAMS / f"{program}.mjs").read_text())
    ended = subprocess.run(["node", source, scripted, "any"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == dict.fromkeys(answers, SAID)
