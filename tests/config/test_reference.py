"""The reference page and the options behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from midflight.config.options import options
from midflight.config.reference import descriptions, reference, section_class


def test_the_page_in_docs_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == reference(), "run: python -m midflight.config.reference docs/configuration.md"


def test_every_option_has_a_sentence() -> None:
    known = descriptions()
    missing = [
        key
        for key in options()
        if not known.get((section_class(key.rpartition(".")[0]).__name__, key.rpartition(".")[2]), "").endswith(".")
    ]
    assert missing == []


def test_importing_the_configuration_leaves_torch_alone() -> None:
    code = (
        "import sys, midflight.config.reference, midflight.config.derived; print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
