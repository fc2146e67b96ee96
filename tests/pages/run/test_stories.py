"""Every page that has something to run, from its first block to its last (`make test-docs`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..blocks import ROOT, blocks_of
from ..story import TOLD, Story, free_ports


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    told = Story(tmp_path, free_ports())
    told.command("midflight new-model MODEL_DIR")
    yield told
    told.close()


@pytest.mark.parametrize("page", TOLD, ids=lambda page: str(page.relative_to(ROOT)))
def test_everything_on_the_page_runs_in_its_order(story: Story, page: Path) -> None:
    story.tell(blocks_of(page))
