"""The ledger of a run is what its own books say."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from midflight.archive.ledger import MEANINGS, ledger_of
from midflight.archive.samples import ledger_table
from midflight.buffer.books import Books
from midflight.config import Config
from midflight.run.rollout.system import accounts, buffer_limits
from midflight.trajectories.store import Store
from midflight.types import Fate, Reason

from .stores import Recorded


def recorded(folder: Path) -> None:
    """One group of each fate; each rollout has 9 tokens to train on ("answer 0" and its end)."""
    with Recorded(folder) as store:
        made = [store.group(index, (0.0, 1.0)) for index in range(4)]
        store.group(4, (0.5, None), source="sums", error="OSError: no")
        store.train(made[0], version=1)
        store.train(made[1], version=2, lasting=False)
        store.drop(made[2], Reason.STALE)


def test_it_says_where_every_token_is_by_source(tmp_path: Path) -> None:
    recorded(tmp_path)
    ledger = ledger_of(tmp_path)
    assert ledger.balanced
    letters, sums = ledger.sources
    assert letters.tokens == {(Fate.TRAINED, None): 36, (Fate.DROPPED, Reason.STALE): 18, (Fate.WAITING, None): 18}
    assert sums.tokens == {(Fate.WAITING, None): 9, (Fate.DROPPED, Reason.NO_REWARD): 9}
    assert ledger.accounts.received_tokens == 36 + 18 + 18 + 9 + 9


def test_it_equals_the_books_that_the_run_would_make_of_the_same_store(tmp_path: Path) -> None:
    recorded(tmp_path)
    books = Books(buffer_limits(Config().rollout))
    store = Store(tmp_path / "store.sqlite", run=None)
    for fact in store.facts():
        books.apply(fact)
    store.close()
    assert ledger_of(tmp_path).accounts == accounts(books)


def test_a_store_that_does_not_add_up_is_said_to(tmp_path: Path) -> None:
    recorded(tmp_path)
    with closing(sqlite3.connect(tmp_path / "store.sqlite")) as other, other:
        other.execute("DELETE FROM fates WHERE position = 3 AND sample = 1")
        other.execute("UPDATE fates SET fate = 'waiting' WHERE position = 0 AND sample = 0")
    ledger = ledger_of(tmp_path)
    assert not ledger.balanced
    assert ledger.mistakes == (
        "1 rollouts of groups that have ended still have tokens that wait",
        "1 rollouts have tokens in no account",
    )


def test_every_reason_has_a_meaning_and_the_table_a_line_for_each_place(tmp_path: Path) -> None:
    assert set(MEANINGS) == set(Reason)
    recorded(tmp_path)
    cells = list(ledger_table(ledger_of(tmp_path)).columns[0].cells)
    assert cells[:6] == ["received", "waiting", "trained", "dropped: no_reward", "dropped: stale", "in flight"]
