"""The tokenizer of models that Midflight makes: one token per byte, and six special tokens.

Ids 0..255 are the bytes; `SPECIAL_TOKENS` follow. It is saved as a normal Hugging Face folder, so
every loader can read it.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|pad|>")
"""Ids 256 to 261. `<|end|>` ends every message and is the end of text."""

END, USER, ASSISTANT, SYSTEM, TOOL, PAD = range(256, 262)
VOCAB_SIZE = 262

CHAT_TEMPLATE = (
    "{% if tools and list_tools is not false %}"
    "{{ '<|system|>Tools, one JSON object a line:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ tool | tojson ~ '\\n' }}{% endfor %}"
    '{{ \'</tools>\\nTo call one, write:\\n<tool_call>\\n{"name": its name, "arguments": an '
    "object}\\n</tool_call><|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant', 'system', 'tool') %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}"
    "{% endif %}"
    "{{ '<|' ~ message.role ~ '|>' ~ (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\\n' if message.content or not loop.first else '' }}"
    "{% set written = call.function.arguments %}"
    "{{ '<tool_call>\\n{\"name\": ' ~ call.function.name | tojson ~ ', \"arguments\": ' }}"
    "{{ written if written is string else written | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Tools and their calls are written in the form of Hermes; with `list_tools = false` only the
calls. Without them the text holds only the messages.
"""


def byte_tokenizer() -> Tokenizer:
    """The `tokenizers` object: a byte-level BPE without merges."""
    letters = _byte_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    return tokenizer


def write_byte_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template) into
    `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def byte_letters_to_bytes() -> dict[str, int]:
    """The byte for each letter of a byte-level vocabulary."""
    return {letter: byte for byte, letter in enumerate(_byte_letters())}


def _byte_letters() -> list[str]:
    """The printable letter for each byte, as byte-level BPE (GPT-2) writes them. Printable Latin-1
    letters are written as they are. The other bytes are written as the letters from U+0100 on, in
    order.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    shifted = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    letters: list[str] = []
    for byte in range(256):
        own = chr(byte)
        letters.append(own if own in alphabet else next(shifted))
    return letters
