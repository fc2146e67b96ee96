"""Tokenizers for the tests: bytes, a small trained byte-level BPE with merges, and one of the other kind (byte fallback)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from midflight.text import Tokenizer
from midflight.text.byte_tokenizer import write_byte_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "über naïve façade 東京 東京都 🦊🦊 fox",
    "<think> the dog </think> the answer",
] * 20

THINKING_TEMPLATE = (
    "{%- for m in messages %}\n"
    "{%- set content = m.content %}\n"
    "{%- if m.role == 'assistant' and not loop.last %}\n"
    "{%- set content = content.split('</think>')[-1] %}\n"
    "{%- endif %}\n"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
"""Like several current models': what an earlier turn thought is cut from the history."""


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "<｜fin｜>")])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    """SentencePiece's way: words with a leading mark, and `<0x..>` for bytes of unknown letters."""
    words = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁fox", "▁the", "f", "o", "x", "é"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, template=None, eos_token_ids=frozenset())


@pytest.fixture(scope="session")
def byte_tokenizer(byte_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_folder)


@pytest.fixture(scope="session")
def bpe_tokenizer(bpe_folder: Path) -> Tokenizer:
    return Tokenizer.load(bpe_folder)
