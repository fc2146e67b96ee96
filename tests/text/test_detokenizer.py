from __future__ import annotations

import random

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from midflight.text import IncrementalDetokenizer, Tokenizer

TEXT = "the fox 東京都 naïve 🦊👩‍🚀 end"


def pieces(tokenizer: Tokenizer, ids: list[int] | tuple[int, ...], *, skip_special: bool = False) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, keep=frozenset() if skip_special else tokenizer.special_token_ids)
    return [*[detokenizer.push(i) for i in ids], detokenizer.finish()]


def test_half_a_character_is_never_shown(byte_tokenizer: Tokenizer, bpe_tokenizer: Tokenizer) -> None:
    for tokenizer in (byte_tokenizer, bpe_tokenizer):
        parts = pieces(tokenizer, tokenizer.encode(TEXT))
        assert all("\ufffd" not in part for part in parts)
        assert "".join(parts) == TEXT
        assert len([p for p in parts if p]) > 10, "text comes as tokens arrive"


def test_a_byte_of_a_character_waits_for_the_rest(byte_tokenizer: Tokenizer) -> None:
    assert pieces(byte_tokenizer, list("é!".encode())) == ["", "é", "!", ""]
    assert pieces(byte_tokenizer, list("é".encode())[:1]) == ["", "\ufffd"]


def test_special_tokens_are_skipped_where_asked(byte_tokenizer: Tokenizer) -> None:
    assert "".join(pieces(byte_tokenizer, [258, 104, 256], skip_special=True)) == "h"
    assert "".join(pieces(byte_tokenizer, [258, 104, 256])) == "<|assistant|>h<|end|>"


@given(st.lists(st.integers(0, 400), max_size=40))
@settings(max_examples=300, deadline=None)
def test_the_pieces_of_any_tokens_join_to_the_decoded_whole(byte_tokenizer: Tokenizer, bpe_tokenizer: Tokenizer, ids: list[int]) -> None:
    for tokenizer in (byte_tokenizer, bpe_tokenizer):
        known = [i for i in ids if i < tokenizer.vocab_size]
        for skip in (True, False):
            assert "".join(pieces(tokenizer, known, skip_special=skip)) == tokenizer.decode(known, skip_special=skip)


def test_vocabularies_with_byte_fallback_join_to_the_decoded_whole(fallback_tokenizer: Tokenizer) -> None:
    fox, the = fallback_tokenizer.backend.token_to_id("▁fox"), fallback_tokenizer.backend.token_to_id("▁the")
    japanese = [1 + b for b in "東".encode()]
    assert pieces(fallback_tokenizer, [the, *japanese, fox]) == ["the", "", "", "", "東 fox", ""]
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.choice([fox, the, *japanese, 1 + 0xFF, 260, 263]) for _ in range(12)]
        assert "".join(pieces(fallback_tokenizer, ids)) == fallback_tokenizer.decode(ids)


def test_a_run_of_bytes_is_shown_when_it_has_ended(fallback_tokenizer: Tokenizer) -> None:
    """It is decoded as one: a bracket before half a character is none."""
    bracket, half, fox = 1 + ord("("), 1 + 0xA2, fallback_tokenizer.backend.token_to_id("▁fox")
    assert fallback_tokenizer.decode([bracket, half]) == "\ufffd\ufffd"
    assert pieces(fallback_tokenizer, [bracket, half, fox]) == ["", "", "\ufffd\ufffd fox", ""]
    assert pieces(fallback_tokenizer, [bracket, half]) == ["", "", "\ufffd\ufffd"]


WORDS = ["[UNK]", "the", "fox", "##es", ".", "?", "'", "n't", "'m", "do", "not", "\ufffd", "é"]


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=12))
@settings(max_examples=200, deadline=None)
def test_words_with_their_blanks_cleaned_up_join_to_the_decoded_whole(ids: list[int]) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer = Tokenizer(backend, template=None, eos_token_ids=frozenset())
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
