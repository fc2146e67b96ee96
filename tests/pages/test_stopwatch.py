"""What a page says of its minutes is held against the seconds that it took."""

from __future__ import annotations

from pathlib import Path

import pytest

from .blocks import ROOT
from .stopwatch import STATED, TO_DO, is_late
from .story import TOLD


@pytest.mark.parametrize(
    ("seconds", "stated", "late"),
    [
        (61, "To read: 1 minute. To do: 1 minute.", True),
        (60, "To read: 1 minute. To do: 1 minute.", False),
        (300, "To read: 4 minutes. To do: 5 minutes for the first run.", False),
        (1501, "To read: 5 minutes. To do: 15 to 25 minutes for the two tasks.", True),
        (1499, "To read: 5 minutes. To do: 15 to 25 minutes for the two tasks.", False),
    ],
)
def test_a_page_is_late_after_the_most_minutes_that_it_says(seconds: float, stated: str, late: bool) -> None:
    assert is_late(seconds, stated) is late


@pytest.mark.parametrize("stated", ["To read: 4 minutes.", "A page to look things up in."])
def test_a_page_that_says_no_minutes_to_do_is_never_late(stated: str) -> None:
    assert not is_late(3600, stated)


@pytest.mark.parametrize("page", [page for page in TOLD if page.parent != ROOT], ids=lambda page: page.name)
def test_a_page_that_has_something_to_run_says_the_minutes_to_do_it(page: Path) -> None:
    stated = STATED.search(page.read_text())
    assert stated is not None
    assert TO_DO.search(stated[1]) or stated[1] == "A page to look things up in.", stated[1]
