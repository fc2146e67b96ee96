"""Which format a model writes: by name, or by what its chat template and its special tokens show."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from midflight.errors import ConfigError, nearest
from midflight.text.formats.hermes import Hermes
from midflight.text.formats.llama import Llama3
from midflight.text.formats.mistral import ARGUMENTS, Mistral
from midflight.text.formats.qwen_coder import PARAMETER, QwenCoder
from midflight.text.formats.thinking import MISTRAL_THINK, THINK, Thinking
from midflight.text.formats.tool_format import ToolFormat
from midflight.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"

_TOOLS: Mapping[str, Callable[[bool], ToolFormat]] = {
    "hermes": lambda named: Hermes(),
    "llama3": lambda named: Llama3(),
    "mistral": Mistral,
    "qwen_coder": lambda named: QwenCoder(),
}
"""Made with whether the model knows `[ARGS]`."""

_REASONING: Mapping[str, Thinking] = {"think": THINK, "mistral": MISTRAL_THINK}

TOOL_FORMATS = (AUTO, NONE, *_TOOLS)
REASONING_FORMATS = (AUTO, NONE, *_REASONING)

_TOOL_SIGNS = ((PARAMETER, "qwen_coder"), (Hermes.opening, "hermes"), (Mistral.opening, "mistral"), (Llama3.opening, "llama3"))
"""What a template or a vocabulary that has the first is taken to write; the first that is found counts."""

_REASONING_SIGNS = tuple((marker, name) for name, thinking in _REASONING.items() for marker in thinking.markers)


def tool_format(name: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """`None`: the model has no format of its own. An unknown name: `ConfigError`."""
    chosen = _chosen("tool_format", name, TOOL_FORMATS, _TOOL_SIGNS, tokenizer)
    return None if chosen == NONE else _TOOLS[chosen](ARGUMENTS in _source(tokenizer) or ARGUMENTS in _special_tokens(tokenizer))


def reasoning_format(name: str, tokenizer: Tokenizer) -> Thinking | None:
    """`None`: the model does not think. An unknown name: `ConfigError`."""
    chosen = _chosen("reasoning_format", name, REASONING_FORMATS, _REASONING_SIGNS, tokenizer)
    return None if chosen == NONE else _REASONING[chosen]


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Texts of the tokens that are never part of a longer text (special ones, and others), and their ids."""
    return {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}


def _special_tokens(tokenizer: Tokenizer) -> set[str]:
    return {text for text, i in added_tokens(tokenizer).items() if i in tokenizer.special_token_ids}


def _chosen(option: str, name: str, known: tuple[str, ...], signs: tuple[tuple[str, str], ...], tokenizer: Tokenizer) -> str:
    if name not in known:
        raise ConfigError(f"{option} is {name!r}: no such format.{nearest(name, known)}")
    if name != AUTO:
        return name
    places = (_source(tokenizer), _special_tokens(tokenizer))
    return next((named for place in places for sign, named in signs if sign in place), NONE)


def _source(tokenizer: Tokenizer) -> str:
    return "" if tokenizer.template is None else tokenizer.template.source
