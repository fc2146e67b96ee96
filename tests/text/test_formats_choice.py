from __future__ import annotations

from typing import get_args

import pytest
from tests.text.written import CODER, LLAMA, MISTRAL, MISTRAL_NAMED, PLAIN, QWEN, R1, model

from midflight.config.sections import GatewaySection
from midflight.errors import ConfigError
from midflight.testing.script import scripted_tokenizer
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat
from midflight.text.formats.format import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from midflight.text.formats.json_formats import Hermes, Llama3, Mistral
from midflight.text.formats.qwen_coder import QwenCoder
from midflight.text.formats.thinking import MISTRAL_THINK, THINK


@pytest.mark.parametrize(
    ("tokenizer", "tools", "thinking"),
    [
        (model(QWEN), Hermes, THINK),
        (model(LLAMA), Llama3, None),
        (model(MISTRAL), Mistral, None),
        (model(MISTRAL_NAMED), Mistral, MISTRAL_THINK),
        (model(CODER), QwenCoder, None),
        (model(R1), None, THINK),
        (model(PLAIN), None, None),
        (model(None), None, None),
        (model(PLAIN, ["[TOOL_CALLS]", "[THINK]"]), Mistral, MISTRAL_THINK),
        (model(None, ["<|python_tag|>", "<think>"]), Llama3, THINK),
        (model(QWEN, ["<|python_tag|>", "[THINK]"]), Hermes, THINK),
        (model(PLAIN, added=["<tool_call>", "<think>"]), None, None),
        (scripted_tokenizer(), Hermes, None),
    ],
)
def test_the_template_says_what_the_model_writes_and_else_its_special_tokens(
    tokenizer: Tokenizer, tools: type | None, thinking: object
) -> None:
    found = tool_format("auto", tokenizer)
    assert (None if found is None else type(found)) is tools
    assert reasoning_format("auto", tokenizer) == thinking


@pytest.mark.parametrize(
    ("tokenizer", "named"),
    [
        (model(MISTRAL), False),
        (model(MISTRAL_NAMED), True),
        (model(PLAIN, ["[TOOL_CALLS]"]), False),
        (model(PLAIN, ["[TOOL_CALLS]", "[ARGS]"]), True),
    ],
)
def test_a_mistral_that_knows_the_arguments_marker_writes_names(tokenizer: Tokenizer, named: bool) -> None:
    assert tool_format("mistral", tokenizer) == Mistral(named=named)


def test_a_name_overrides_what_the_template_says() -> None:
    text = "[TOOL_CALLS]clock{}"
    assert MessageFormat(model(QWEN)).parse(text, None, calls=True).content == text
    assert [c.name for c in MessageFormat(model(QWEN), tools="mistral").parse(text, None, calls=True).tool_calls] == ["clock"]
    assert MessageFormat(model(QWEN), reasoning="none").parse("<think>a</think>b", None, calls=True).content == "<think>a</think>b"


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"^tool_format is 'hermés': no such format\. Did you mean 'hermes'\?$"):
        MessageFormat(model(), tools="hermés")
    with pytest.raises(ConfigError, match=r"^reasoning_format is 'thinks': no such format\. Did you mean 'think'\?$"):
        MessageFormat(model(), reasoning="thinks")


def test_the_options_of_a_run_are_the_known_formats() -> None:
    fields = GatewaySection.model_fields
    assert get_args(fields["tool_format"].annotation) == TOOL_FORMATS
    assert get_args(fields["reasoning_format"].annotation) == REASONING_FORMATS


def test_markers_that_are_special_tokens_are_kept_for_the_parser() -> None:
    """The byte tokenizer's own tokens end at 261."""
    special = ["[TOOL_CALLS]", "[ARGS]", "[INST]", "[THINK]", "[/THINK]"]
    assert MessageFormat(model(MISTRAL_NAMED, special)).kept_token_ids == {262, 263, 265, 266}
    assert MessageFormat(model(MISTRAL_NAMED, special), reasoning="none").kept_token_ids == {262, 263}
    assert MessageFormat(model(QWEN, special)).kept_token_ids == frozenset()
    assert MessageFormat(model(PLAIN, ["<tool_call>", "</tool_call>"]), tools="none").kept_token_ids == {262, 263}
    assert MessageFormat(model(QWEN, added=["<tool_call>"])).kept_token_ids == frozenset()
