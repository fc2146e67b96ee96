"""Agents of other people's frameworks, unmodified: each page's run trains what it recorded (`make test-agents`).

Their environments have the frameworks, and find what Midflight needs in the one that it is developed in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pages import story as stories
from tests.pages.blocks import ROOT, Block, blocks_of
from tests.shares import check_trained_share

from midflight.archive.ledger import ledger_of

from .frameworks import EXAMPLES, SHOWN, story_of

STEPS = 3
PROGRAM_PAGE = ROOT / "docs" / "adapters" / "any-program.md"


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stories.Story]:
    """Of three steps, without an evaluation of what is not looked at."""
    small = stories.small

    def smaller(words: list[str], folder: Path) -> list[str]:
        settings = (f"run.steps={STEPS}", "environment.sources.0.heldout=2", "environment.sources.1.heldout=2", "rollout.group_size=2")
        more = [word for setting in settings for word in ("--set", setting)]
        return [*small(words, folder), *more]

    monkeypatch.setattr(stories, "small", smaller)
    told = stories.Story(tmp_path, (0, 0))
    yield told
    told.close()


def trained(story: stories.Story, page: list[Block]) -> None:
    """Every step was made on tokens that agents of the run had sampled, and on rewards that differed."""
    (command,) = [line for block in page if block.language == "bash" for line in block.commands()]
    words = command.split()
    folder = story.folder / words[words.index("--folder") + 1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == STEPS
    assert all(step["tokens"] > 0 for step in steps), steps
    assert any(step["reward_spread"] > 0 for step in steps), steps
    ledger = ledger_of(folder)
    check_trained_share(ledger.accounts.received_tokens, ledger.accounts.masked_tokens)
    assert ledger.balanced and ledger.accounts.trained_tokens == sum(step["tokens"] for step in steps), ledger.mistakes


@pytest.mark.parametrize("name", [SHOWN, *EXAMPLES])
def test_the_agent_of_a_framework_is_trained_as_it_is(story: stories.Story, name: str) -> None:
    page = story_of(name)
    story.tell(page)
    trained(story, page)


def test_a_program_of_another_language_is_trained_as_its_page_says(story: stories.Story) -> None:
    page = blocks_of(PROGRAM_PAGE)
    story.tell(page)
    trained(story, page)


def test_a_program_in_python_needs_nothing_but_its_address(story: stories.Story) -> None:
    page = [block for block in blocks_of(PROGRAM_PAGE) if block.file != "agent.mjs"]
    (story.folder / "agent.py").write_text(PROGRAM)
    adapted = [
        Block(b.page, b.line, b.language, b.text.replace('"node", "agent.mjs"', f'"{sys.executable}", "agent.py"'), b.mark) for b in page
    ]
    story.tell(adapted)
    trained(story, page)


PROGRAM = """
import json, os, sys, urllib.request
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
