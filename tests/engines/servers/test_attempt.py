"""Which weights made which token of a request at a server (I6): what is told at once, and what the server says at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.engines.servers.server import Attempt, EventTokens
from midflight.types import Segment


def fed(attempt: Attempt, num: int) -> list[tuple[int, int]]:
    """The labels of that many pieces of one token, of a server that says nothing of versions before the end."""
    return [label for _ in range(num) for label in told(attempt, 1)]


def told(attempt: Attempt, num: int, *spans: tuple[str, int, int]) -> list[tuple[int, int]]:
    """The labels of a piece of that many tokens, of a server that says this with it."""
    return [(version, attempt.kv_version(version)) for version in attempt.take(EventTokens(token_ids=(97,) * num, spans=spans))]


def said(*spans: tuple[str, int, int]) -> EventTokens:
    return EventTokens(spans=spans)


@pytest.mark.parametrize("num_on_the_way", [0, 1, 5])
def test_tokens_have_the_version_that_the_server_says_with_them_however_many_an_answer_about_weights_overtakes(num_on_the_way: int) -> None:
    attempt = Attempt(3)
    early = told(attempt, 2, ("3", 0, 2))
    attempt.changed(4, recomputed=True, late=0)
    for _ in range(num_on_the_way):
        early += told(attempt, 1, ("3", 0, attempt.num_tokens + 1))
    num_old = 2 + num_on_the_way
    assert early == [(3, 3)] * num_old
    assert told(attempt, 3, ("3", 0, num_old + 1), ("4", num_old + 1, num_old + 3)) == [(3, 3), (4, 4), (4, 4)]
    assert attempt.version == 4


def test_tokens_of_new_weights_may_come_before_the_answer_that_the_server_has_them() -> None:
    """As where they are swapped between two steps. Their keys are as old as those of the tokens before."""
    attempt = Attempt(0)
    attempt.changed(1, recomputed=True, late=0)
    assert told(attempt, 2, ("1", 0, 1), ("2", 1, 2)) == [(1, 1), (2, 1)]
    attempt.changed(2, recomputed=False, late=0)
    assert told(attempt, 1, ("1", 0, 1), ("2", 1, 3)) == [(2, 1)]


def test_of_a_server_that_says_versions_at_the_end_tokens_have_the_first_version_until_then() -> None:
    attempt = Attempt(3)
    early = fed(attempt, 2)
    attempt.changed(4, recomputed=True, late=0)
    early += fed(attempt, 20)
    assert early == [(3, 3)] * 22
    assert told(attempt, 1, ("3", 0, 4), ("4", 4, 23)) == [(4, 4)]


def test_a_piece_without_tokens_changes_no_version() -> None:
    attempt = Attempt(3)
    assert told(attempt, 0, ("4", 0, 0)) == [] and attempt.version == 3


def test_an_account_of_more_tokens_than_came_is_cut() -> None:
    attempt = Attempt(0)
    assert told(attempt, 2, ("0", 0, 1), ("1", 1, 4), ("2", 4, 6)) == [(0, 0), (1, 0)]


def test_in_keep_old_keys_stay_until_they_are_recomputed() -> None:
    attempt = Attempt(0)
    fed(attempt, 2)
    attempt.changed(1, recomputed=False, late=0)
    fed(attempt, 2)
    attempt.changed(2, recomputed=True, late=0)
    fed(attempt, 2)
    assert attempt.account(said(("0", 0, 2), ("1", 2, 4), ("2", 4, 6))) == (Segment(0, 0, 0, 2), Segment(1, 0, 2, 4), Segment(2, 2, 4, 6))


def test_an_account_that_is_early_is_put_back_by_as_many_tokens() -> None:
    attempt = Attempt(0)
    fed(attempt, 5)
    attempt.changed(1, recomputed=False, late=1)
    fed(attempt, 1)
    assert attempt.account(said(("0", 0, 4), ("1", 4, 6))) == (Segment(0, 0, 0, 5), Segment(1, 0, 5, 6))


def test_a_span_that_is_late_to_the_last_token_leaves_no_empty_segment() -> None:
    attempt = Attempt(0)
    attempt.changed(1, recomputed=False, late=1)
    fed(attempt, 3)
    assert attempt.account(said(("0", 0, 2), ("1", 2, 3))) == (Segment(0, 0, 0, 3),)


def test_a_first_span_is_never_put_back() -> None:
    attempt = Attempt(0)
    attempt.changed(1, recomputed=False, late=1)
    fed(attempt, 3)
    assert attempt.account(said(("1", 0, 3))) == (Segment(1, 0, 0, 3),)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (("0", 0, 2),),
        (("0", 1, 3),),
        (("0", 0, 1), ("1", 2, 3)),
        (("1", 0, 1), ("0", 1, 3)),
        (("0", 0, 3), ("1", 3, 3)),
    ],
)
def test_an_account_that_does_not_cover_what_was_received_is_none(spans: tuple[tuple[str, int, int], ...]) -> None:
    attempt = Attempt(0)
    fed(attempt, 3)
    attempt.changed(1, recomputed=False, late=0)
    assert attempt.account(EventTokens(spans=spans)) in ((), (Segment(0, 0, 0, 3),))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=5), st.integers(1, 3), st.integers(0, 4), st.booleans())
def test_labels_told_early_are_never_newer_than_an_account_that_is_true(
    changes: list[tuple[int, bool]], last: int, num_overtaken: int, with_each: bool
) -> None:
    """Whether the server says versions with each piece or at the end, and however many pieces an answer about weights overtakes."""
    true = [version for version, (num, _) in enumerate([*changes, (last, True)]) for _ in range(num)]
    spans = [(f"{v}", true.index(v), len(true) - true[::-1].index(v)) for v in sorted(set(true))]
    attempt = Attempt(0)
    early: list[tuple[int, int]] = []
    for version, (_, recomputed) in enumerate(changes, start=1):
        num_before = sum(num for num, _ in changes[:version]) - num_overtaken
        while len(early) < num_before:
            early += told(attempt, 1, *(begun(spans, len(early) + 1) if with_each else ()))
        attempt.changed(version, recomputed=recomputed, late=0)
    while len(early) < len(true):
        early += told(attempt, 1, *(begun(spans, len(early) + 1) if with_each else ()))
    account = [s for s in attempt.account(said(*spans)) for _ in range(s.start, s.end)]
    assert len(account) == len(early)
    assert all(version <= final.version for (version, _), final in zip(early, account, strict=True))
    assert not with_each or [version for version, _ in early] == true
    assert all(s.kv_version <= s.version for s in account)


def begun(spans: list[tuple[str, int, int]], num: int) -> list[tuple[str, int, int]]:
    """What a server says when it has made that many of the tokens."""
    return [(label, start, min(end, num)) for label, start, end in spans if start < num]
