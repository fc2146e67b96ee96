"""Which weights made which token of a request at a server (I6): what is told at once, and what the server says at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.engines.servers.server import Attempt, EventTokens
from midflight.types import Segment


def fed(attempt: Attempt, num: int) -> list[tuple[int, int]]:
    """The labels of that many pieces of one token."""
    told: list[tuple[int, int]] = []
    for _ in range(num):
        told.append(attempt.labels(any_tokens=True))
        attempt.num_tokens += 1
    return told


def said(*spans: tuple[str, int, int]) -> EventTokens:
    return EventTokens(spans=spans)


def test_the_piece_after_a_change_keeps_the_label_before_because_it_may_have_been_on_its_way() -> None:
    attempt = Attempt(3)
    assert fed(attempt, 2) == [(3, 3)] * 2
    attempt.changed(4, recomputed=True, under_way=0, late=0)
    assert attempt.labels(any_tokens=False) == (3, 3), "a piece without tokens brings no label nearer"
    assert fed(attempt, 3) == [(3, 3), (4, 4), (4, 4)]


def test_where_a_step_was_under_way_one_more_piece_keeps_the_label_before() -> None:
    """A token that was on its way, then the one under way when the weights changed: the account gives both to the old ones, or is put back
    by the second."""
    for late in (0, 1):
        attempt = Attempt(0)
        told = fed(attempt, 1)
        attempt.changed(1, recomputed=False, under_way=1, late=late)
        told += fed(attempt, 3)
        account = attempt.account(said(("0", 0, 3 - late), ("1", 3 - late, 4)))
        assert told == [(0, 0), (0, 0), (0, 0), (1, 0)]
        assert account == (Segment(0, 0, 0, 3), Segment(1, 0, 3, 4))


def test_in_keep_old_keys_stay_until_they_are_recomputed() -> None:
    attempt = Attempt(0)
    fed(attempt, 2)
    attempt.changed(1, recomputed=False, under_way=0, late=0)
    fed(attempt, 2)
    attempt.changed(2, recomputed=True, under_way=0, late=0)
    fed(attempt, 2)
    assert attempt.account(said(("0", 0, 2), ("1", 2, 4), ("2", 4, 6))) == (Segment(0, 0, 0, 2), Segment(1, 0, 2, 4), Segment(2, 2, 4, 6))


def test_an_account_that_is_early_is_put_back_by_as_many_tokens() -> None:
    attempt = Attempt(0)
    fed(attempt, 5)
    attempt.changed(1, recomputed=False, under_way=1, late=1)
    fed(attempt, 1)
    assert attempt.account(said(("0", 0, 4), ("1", 4, 6))) == (Segment(0, 0, 0, 5), Segment(1, 0, 5, 6))


def test_a_span_that_is_late_to_the_last_token_leaves_no_empty_segment() -> None:
    attempt = Attempt(0)
    attempt.changed(1, recomputed=False, under_way=1, late=1)
    fed(attempt, 3)
    assert attempt.account(said(("0", 0, 2), ("1", 2, 3))) == (Segment(0, 0, 0, 3),)


def test_a_first_span_is_never_put_back() -> None:
    attempt = Attempt(0)
    attempt.changed(1, recomputed=False, under_way=1, late=1)
    fed(attempt, 3)
    assert attempt.account(said(("1", 0, 3))) == (Segment(1, 0, 0, 3),)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (("default", 0, 3),),
        (("0", 0, 2),),
        (("0", 1, 3),),
        (("0", 0, 1), ("1", 2, 3)),
        (("1", 0, 1), ("0", 1, 3)),
        (("0", 0, 4),),
        (("0", 0, 3), ("1", 3, 3)),
    ],
)
def test_an_account_that_does_not_fit_what_was_received_is_none(spans: tuple[tuple[str, int, int], ...]) -> None:
    attempt = Attempt(0)
    fed(attempt, 3)
    attempt.changed(1, recomputed=False, under_way=0, late=0)
    assert attempt.account(EventTokens(spans=spans)) in ((), (Segment(0, 0, 0, 3),))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=5), st.integers(0, 1), st.booleans(), st.integers(1, 3))
def test_labels_told_early_are_never_newer_than_an_account_that_is_true(
    changes: list[tuple[int, bool]], under_way: int, counts: bool, last: int
) -> None:
    """A server that labels a token by the weights it had when the token came: up to one piece after a change is of the old ones."""
    attempt = Attempt(0)
    told: list[tuple[int, int]] = []
    true: list[int] = []
    for version, (num, recomputed) in enumerate([*changes, (last, True)], start=0):
        if version:
            under_way_now = 0 if recomputed else under_way
            attempt.changed(version, recomputed=recomputed, under_way=under_way_now, late=0 if counts else under_way_now)
        told += fed(attempt, num)
        true += [version] * num
    spans = [(f"{v}", true.index(v), len(true) - true[::-1].index(v)) for v in sorted(set(true))]
    account = [s for s in attempt.account(said(*spans)) for _ in range(s.start, s.end)]
    assert len(account) == len(told)
    assert all(early[0] <= final.version for early, final in zip(told, account, strict=True))
    assert all(s.kv_version <= s.version for s in account)
