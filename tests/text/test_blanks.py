"""Tokenizers of the SentencePiece kind: a blank before every text, bytes for unknown letters."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tests.gateway.conversing import turn
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from midflight.gateway.sessions.tree import TokenTree
from midflight.text import ChatTemplate, Tokenizer
from midflight.text.detokenizer import IncrementalDetokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]
TEMPLATE = "<s>{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def kind(name: str) -> Tokenizer:
    """`always`, `first`, `never`: where Metaspace puts its blank; `old`: before every part, by the normaliser."""
    pieces = ["▁", "▁hi", "hi", "a", "u", ":", "\n", "h", "i", "x"]
    vocabulary = [(s, 0.0) for s in SPECIALS] + [(f"<0x{i:02X}>", -12.0) for i in range(256)]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary + [(p, -2.0 - 0.01 * k) for k, p in enumerate(pieces)], 0, byte_fallback=True))
    if name == "old":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=name, split=False)
    strip = [] if name == "never" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return Tokenizer(backend, template=ChatTemplate(TEMPLATE, {}), eos_token_ids=frozenset({2}))


def pieces(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[str]:
    return [tokenizer.backend.id_to_token(i) or "" for i in ids]


@pytest.mark.parametrize("name", ["always", "first", "never", "old"])
def test_a_text_that_goes_on_has_no_blank_before_it(name: str) -> None:
    tokenizer = kind(name)
    after_text = tokenizer.encode_after(tokenizer.encode("x")[-1], "\nu:hi")
    assert pieces(tokenizer, after_text) == ["\n", "u", ":", "hi"]
    blank = ["▁"] if name in ("always", "old") else []
    after_special = tokenizer.encode_after(2, "\nu:hi")
    assert pieces(tokenizer, after_special) == [*blank, "\n", "u", ":", "hi"], "as in a text with the special token before it"
    assert (2, *after_special) == tokenizer.encode("</s>\nu:hi")
    assert tokenizer.encode_after(2, "") == ()


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", ["always", "first", "never", "old"])
def test_i4_a_conversation_goes_on_with_the_ids_of_its_text(name: str, ended: bool) -> None:
    tokenizer = kind(name)
    tree = TokenTree(tokenizer)
    first = tree.plan_chat([{"role": "user", "content": "hi"}])
    said = tuple(tokenizer.backend.token_to_id(p) or 0 for p in ("hi", "x"))
    tree.record(first, turn(first, (*said, 2) if ended else said), reply="hix", request=1)
    again = tree.plan_chat([{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "hix"), ("user", "x"))])
    assert again.parent is not None and again.ids[: len(first.ids) + 2] == first.ids + said
    assert again.ids == tokenizer.encode(again.text or "")


@pytest.mark.parametrize("name", ["always", "first", "never", "old"])
def test_streamed_text_is_the_text_of_the_whole(name: str) -> None:
    tokenizer, chosen = kind(name), random.Random(7)
    letters = tokenizer.encode("hi é東 x")
    for _ in range(300):
        ids = [chosen.choice([chosen.randrange(tokenizer.vocab_size), chosen.choice(letters)]) for _ in range(chosen.randrange(12))]
        stream = IncrementalDetokenizer(tokenizer)
        assert "".join([stream.push(i) for i in ids]) + stream.finish() == tokenizer.decode(ids, skip_special=True)
