"""Every page that has something to run, from its first block to its last (`make test-docs`)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agents import AGENTS

from ..blocks import PAGES, ROOT, blocks_of, lacks
from ..story import Story

TOLD = [page for page in PAGES if page.stem not in AGENTS and not lacks(page) and any(block.tried == "run" for block in blocks_of(page))]


@pytest.fixture
def ports() -> list[int]:
    """Two that are free now."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], other.getsockname()[1]]


@pytest.fixture
def story(tmp_path: Path, ports: list[int]) -> Iterator[Story]:
    told = Story(tmp_path, ports)
    told.command("midflight new-model MODEL_DIR")
    yield told
    told.close()


@pytest.mark.parametrize("page", TOLD, ids=lambda page: str(page.relative_to(ROOT)))
def test_everything_on_the_page_runs_in_its_order(story: Story, page: Path) -> None:
    story.tell(blocks_of(page))
