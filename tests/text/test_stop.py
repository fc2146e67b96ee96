from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midflight.text import StopMatch, StopMatcher, Tokenizer


def run(matcher: StopMatcher, ids: tuple[int, ...]) -> list[str]:
    shown: list[str] = []
    for token_id in ids:
        matcher.feed([token_id])
        shown.append(matcher.take())
    return [*shown, matcher.finish()]


def test_a_stop_string_is_found_across_token_borders(byte_tokenizer: Tokenizer) -> None:
    matcher = StopMatcher(byte_tokenizer, ("END",))
    shown = run(matcher, byte_tokenizer.encode("a EN b END c"))
    assert "".join(shown) == "a EN b "
    assert matcher.match == StopMatch("END", 9), "the tenth byte completes it"


def test_a_stop_string_inside_one_token_cuts_the_text_there(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode("the dog the")
    assert len(ids) == 3
    matcher = StopMatcher(bpe_tokenizer, ("og",))
    assert "".join(run(matcher, ids)) == "the d"
    assert matcher.match == StopMatch("og", 1)


def test_possible_beginnings_are_held_back_until_decided(byte_tokenizer: Tokenizer) -> None:
    assert run(StopMatcher(byte_tokenizer, ("<<>",)), byte_tokenizer.encode("a<<<b")) == ["a", "", "", "<", "<<b", ""]
    assert run(StopMatcher(byte_tokenizer, ("xyz",)), byte_tokenizer.encode("xy")) == ["", "", "xy"]


def test_of_stops_completed_by_one_token_the_earliest_counts(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode(" dog")
    assert len(ids) == 1
    for stops, expected in [(("g", "do"), "do"), (("o", "og"), "o"), (("og", "o"), "og")]:
        assert StopMatcher(bpe_tokenizer, stops).feed(ids) == StopMatch(expected, 0)


def test_stops_completed_before_min_tokens_do_not_stop(byte_tokenizer: Tokenizer) -> None:
    matcher = StopMatcher(byte_tokenizer, ("ab", "abxyz"), min_tokens=2)
    assert matcher.feed(byte_tokenizer.encode("abc-ab")) == StopMatch("ab", 5)
    assert matcher.take() == "abc-"


def test_a_stop_of_multi_byte_letters_is_completed_by_the_last_byte(byte_tokenizer: Tokenizer) -> None:
    matcher = StopMatcher(byte_tokenizer, ("東",))
    assert matcher.feed("a東".encode()[:3]) is None
    assert matcher.take() == "a"
    assert matcher.feed("東".encode()[2:]) == StopMatch("東", 3)


def test_special_tokens_are_neither_shown_nor_matched(byte_tokenizer: Tokenizer) -> None:
    matcher = StopMatcher(byte_tokenizer, ("<|end|>",))
    assert "".join(run(matcher, (104, 256, 105))) == "hi"
    assert matcher.match is None


@pytest.mark.parametrize("stop", [(), ("",)])
def test_without_stop_strings_everything_is_shown_at_once(byte_tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    assert run(StopMatcher(byte_tokenizer, stop), (104, 105)) == ["h", "i", ""]


@given(
    text=st.text("abé東", max_size=20),
    stops=st.lists(st.text("abé東", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_the_first_completed_stop_counts_however_tokens_are_grouped(
    byte_tokenizer: Tokenizer, text: str, stops: list[str], cuts: list[int]
) -> None:
    """I5: grouping of tokens into chunks follows interruptions and must not show."""
    ends = [(text.index(s) + len(s), text.index(s), i, s) for i, s in enumerate(stops) if s in text]
    matcher = StopMatcher(byte_tokenizer, tuple(stops))
    ids, shown = byte_tokenizer.encode(text), ""
    for n in [*cuts, len(ids)]:
        matcher.feed(ids[:n])
        shown += matcher.take()
        ids = ids[n:]
    shown += matcher.finish()
    if not ends:
        assert (matcher.match, shown) == (None, text)
        return
    end, start, _, stop = min(ends)
    assert shown == text[:start]
    assert matcher.match == StopMatch(stop, len(text[:end].encode()) - 1)
