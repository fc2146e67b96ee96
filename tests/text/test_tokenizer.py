from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.conftest import THINKING_TEMPLATE
from transformers import AutoTokenizer

from midflight.errors import ModelNotFound, RequestRejected
from midflight.text import ChatTemplate, Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Was ist 東京? 🦊"},
    {"role": "assistant", "content": "<think>hm</think>A city."},
    {"role": "user", "content": "sure?"},
]
TEXTS = ["", "plain", "über 東京 🦊", " two  spaces\n\ttab", "<|end|>", "a<|user|>b<|pad|>", "<|im_end|>x", "é\u0301"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_byte_tokenizer_is_one_id_per_byte_and_specials_are_single_tokens(byte_tokenizer: Tokenizer, text: str) -> None:
    expected: list[int] = []
    specials = {"<|end|>": 256, "<|user|>": 257, "<|assistant|>": 258, "<|system|>": 259, "<|tool|>": 260, "<|pad|>": 261}
    rest = text
    while rest:
        special = next((s for s in specials if rest.startswith(s)), None)
        expected += [specials[special]] if special else list(rest[0].encode())
        rest = rest[len(special) if special else 1 :]
    assert byte_tokenizer.encode(text) == tuple(expected)
    assert byte_tokenizer.decode(expected) == text


def test_the_byte_tokenizer_names_its_size_and_its_end(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.vocab_size == 262
    assert byte_tokenizer.eos_token_ids == {256}
    assert byte_tokenizer.decode([258, 104, 105, 256], skip_special=True) == "hi"


@pytest.mark.parametrize("which", ["byte_folder", "bpe_folder"])
def test_transformers_loads_the_same_folder_and_agrees_id_for_id(which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert list(ours.encode(text)) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text, add_special_tokens=False))
    assert theirs.eos_token_id in ours.eos_token_ids


TEMPLATES = {
    "roles": "{% for m in messages %}[{{ m['role'] }}] {{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "thinking": THINKING_TEMPLATE,
    "json": "{{ messages | tojson }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ bos_token }}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools is none }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ strftime_now('%Y') }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content or '-' }}{{ m.thinking or '-' }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_conversation_is_rendered_as_transformers_renders_it(bpe_folder: Path, name: str, add_generation_prompt: bool) -> None:
    theirs = AutoTokenizer.from_pretrained(bpe_folder)
    chat = [*CHAT, {"role": "assistant", "content": "<b>yes</b>", "reasoning": "because"}, {"role": "user", "content": "ok"}]
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    expected = theirs.apply_chat_template(chat, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours.render(chat, add_generation_prompt=add_generation_prompt) == expected


def test_the_folders_own_template_is_found_in_config_and_beside_it(byte_tokenizer: Tokenizer, bpe_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.render(CHAT[:2], add_generation_prompt=True) == (
        "<|system|>Be brief.<|end|><|user|>Was ist 東京? 🦊<|end|><|assistant|>"
    )
    assert "<think>" not in bpe_tokenizer.render(CHAT)
    assert bpe_tokenizer.render(CHAT[:3]).endswith("<think>hm</think>A city.<|im_end|>\n")


def test_a_refusal_of_the_template_blames_the_messages(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestRejected, match="unknown role wizard") as caught:
        byte_tokenizer.render([{"role": "wizard", "content": "x"}])
    assert caught.value.param == "messages"


def test_templates_cannot_reach_python_internals() -> None:
    with pytest.raises(RequestRejected):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render([])


def test_missing_files_are_named(tmp_path: Path, bpe_folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((bpe_folder / "tokenizer.json").read_bytes())
    with pytest.raises(ModelNotFound, match="no chat template"):
        Tokenizer.load(tmp_path).render(CHAT)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelNotFound, match="not JSON"):
        Tokenizer.load(tmp_path)


def test_every_end_of_text_a_model_folder_names_counts(tmp_path: Path, byte_folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 261}')
    assert Tokenizer.load(tmp_path).eos_token_ids == {256, 257, 261}


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_what_is_encoded_decodes_to_itself(byte_tokenizer: Tokenizer, bpe_tokenizer: Tokenizer, text: str) -> None:
    for tokenizer in (byte_tokenizer, bpe_tokenizer):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_importing_text_does_not_import_torch_or_transformers() -> None:
    code = "import midflight.text, sys; sys.exit(int(bool({'torch', 'transformers'} & set(sys.modules))))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
