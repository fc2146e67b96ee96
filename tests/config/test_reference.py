"""The reference page and the options behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from midflight.config.options import options
from midflight.config.reference import GROUPS, TEN, descriptions, reference, section_class
from midflight.config.sections import Config


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


def test_ten_options_come_first_and_each_section_stands_in_one_group() -> None:
    assert len(TEN) == 10 and set(TEN) <= options().keys()
    grouped = [section for sections in GROUPS.values() for section in sections]
    assert sorted(grouped) == sorted(Config.model_fields)
    first, _, rest = reference().partition("## The run and its model")
    assert [key for key in TEN if f"`{key.replace('.*', '')}`" not in first] == [] and "### `[run]`" in rest


def test_importing_the_configuration_leaves_torch_alone() -> None:
    code = (
        "import sys, midflight.config.reference, midflight.config.derived; print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
