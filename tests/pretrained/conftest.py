"""The model, fetched once for all files of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.real.processes import Command


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder, and what was said while it was made."""
    place = tmp_path_factory.mktemp("pretrained")
    command = Command("fetch-model", "smollm2-135m", "smollm2", folder=place)
    assert command.wait(600) == 0, command.said
    return place / "smollm2", command.said
