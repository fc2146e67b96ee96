"""The format of one model's messages. It is chosen by name, or from the model's chat template and
special tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from midflight.errors import ConfigError, RequestRejected, nearest
from midflight.text.formats import assistant
from midflight.text.formats.json_formats import ARGUMENTS, Hermes, Llama3, Mistral
from midflight.text.formats.lark import Lark, embedded
from midflight.text.formats.parser import FormatParser, PlainParser
from midflight.text.formats.qwen_coder import PARAMETER, QwenCoder
from midflight.text.formats.thinking import MISTRAL_THINK, THINK, Thinking, ThinkingState
from midflight.text.tokenizer import Tokenizer
from midflight.types import Grammar, GrammarKind

AUTO = "auto"
NONE = "none"

_TOOLS: Mapping[str, Callable[[bool], assistant.ToolFormat]] = {
    "hermes": lambda named: Hermes(),
    "llama3": lambda named: Llama3(),
    "mistral": Mistral,
    "qwen_coder": lambda named: QwenCoder(),
}
"""The makers of the formats. Their argument says whether the model knows `[ARGS]`."""

_REASONING: Mapping[str, Thinking] = {"think": THINK, "mistral": MISTRAL_THINK}

TOOL_FORMATS = (AUTO, NONE, *_TOOLS)
REASONING_FORMATS = (AUTO, NONE, *_REASONING)

_TOOL_SIGNS = (
    (PARAMETER, "qwen_coder"),
    (Hermes.opening, "hermes"),
    (Mistral.opening, "mistral"),
    (Llama3.opening, "llama3"),
)
"""The sign of each format: a template or vocabulary that holds the text uses the format. The first
sign that is found counts.
"""

_REASONING_SIGNS = tuple(
    (marker, name) for name, thinking in _REASONING.items() for marker in thinking.markers
)


def tool_format(name: str, tokenizer: Tokenizer) -> assistant.ToolFormat | None:
    """The format of the model's calls. It is `None` if the model has no format of its own. Raises
    `ConfigError` for an unknown name.
    """
    chosen = _chosen("tool_format", name, TOOL_FORMATS, _TOOL_SIGNS, tokenizer)
    if chosen == NONE:
        return None
    named = ARGUMENTS in _source(tokenizer) or ARGUMENTS in _special_tokens(tokenizer)
    return _TOOLS[chosen](named)


def reasoning_format(name: str, tokenizer: Tokenizer) -> Thinking | None:
    """The form of the model's thinking. It is `None` if the model does not think. Raises
    `ConfigError` for an unknown name.
    """
    chosen = _chosen("reasoning_format", name, REASONING_FORMATS, _REASONING_SIGNS, tokenizer)
    return None if chosen == NONE else _REASONING[chosen]


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the added tokens by their texts. Special tokens are among them. An added token is
    never part of a longer text token.
    """
    return {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}


def _special_tokens(tokenizer: Tokenizer) -> set[str]:
    return {text for text, i in added_tokens(tokenizer).items() if i in tokenizer.special_token_ids}


def _chosen(
    option: str,
    name: str,
    known: tuple[str, ...],
    signs: tuple[tuple[str, str], ...],
    tokenizer: Tokenizer,
) -> str:
    if name not in known:
        raise ConfigError(f"{option} is {name!r}: no such format.{nearest(name, known)}")
    if name != AUTO:
        return name
    for place in (_source(tokenizer), _special_tokens(tokenizer)):
        for sign, named in signs:
            if sign in place:
                return named
    return NONE


def _source(tokenizer: Tokenizer) -> str:
    return "" if tokenizer.template is None else tokenizer.template.source


class MessageFormat:
    """The format of one model's messages: the markers of its tool calls and of its thinking.
    Stateless.
    """

    def __init__(self, tokenizer: Tokenizer, *, tools: str = AUTO, reasoning: str = AUTO) -> None:
        """`auto` chooses from the chat template, else from the special tokens. A model without
        markers for calls writes them in the form of Hermes. With `tools` = `none` only forced calls
        are read. Raises `ConfigError` for an unknown name.
        """
        self._reads_free_calls = tools != NONE
        self._tools = tool_format(tools, tokenizer) or Hermes()
        self._thinking = reasoning_format(reasoning, tokenizer)
        markers = self._tools.markers + (self._thinking.markers if self._thinking else ())
        added = added_tokens(tokenizer)
        self._lark = Lark({marker: added[marker] for marker in markers if marker in added})
        marker_ids = set(self._lark.tokens.values())
        self.kept_token_ids: frozenset[int] = tokenizer.special_token_ids & marker_ids
        """Special tokens that are markers. Their text must reach the parser."""

    def parser(
        self,
        prompt_text: str | None,
        *,
        calls: bool,
        forced: bool = False,
        tools: Sequence[assistant.Tool] = (),
        partly: bool = False,
    ) -> assistant.MessageParser:
        """A parser for one message. `prompt_text` shows whether the prompt opened the thinking.
        With `calls` tool calls are looked for. With `forced` they are looked for even if free text
        is not searched for them. `tools`, if they are known, give types to arguments that the
        format writes without types. With `partly` calls are given out while they grow.
        """
        reads = calls and (forced or self._reads_free_calls)
        if self._thinking is None and not reads:
            return PlainParser()
        opened = (
            self._thinking is not None and self._thinking.begun(prompt_text) is ThinkingState.OPENED
        )
        return FormatParser(
            self._tools if reads else None,
            self._thinking,
            opened=opened,
            known=tools,
            partly=partly,
        )

    def parse(
        self,
        text: str,
        prompt_text: str | None,
        *,
        calls: bool,
        forced: bool = False,
        tools: Sequence[assistant.Tool] = (),
    ) -> assistant.AssistantMessage:
        parser = self.parser(prompt_text, calls=calls, forced=forced, tools=tools)
        return assistant.joined(parser.feed(text) + parser.finish())

    def calls_grammar(
        self, tools: Sequence[assistant.Tool], *, parallel: bool, prompt_text: str | None
    ) -> Grammar:
        """The grammar of a message that calls one of these tools (`parallel`: one or more calls)
        and holds nothing else. Thinking may come first. Arguments match the tool's schema.
        """
        if not tools:
            raise RequestRejected(
                "tool_choice asks for a call, but there is no tool: send tools.",
                param="tool_choice",
            )
        rules = self._tools.rules(self._lark, tools, parallel=parallel)
        start = self._thinking_before("calls", prompt_text) or "start: calls"
        return Grammar(GrammarKind.LARK, f"{start}\n{rules}\n")

    @property
    def announces_calls(self) -> bool:
        """True if a grammar can distinguish calls from the text around them."""
        return self._reads_free_calls and self._tools.announces

    def calls_amid_text(
        self, tools: Sequence[assistant.Tool], *, parallel: bool, prompt_text: str | None
    ) -> Grammar:
        """The grammar of a message with any text and any calls of these tools. Each call has a
        known name, and arguments that match the tool's schema. Without `parallel` the message ends
        with its one call. Only for a format that `announces_calls`.
        """
        marker = self._tools.opening
        rules = self._tools.rules(replace(self._lark, announcing=marker), tools, parallel=parallel)
        start = self._thinking_before("amid", prompt_text) or "start: amid"
        amid = "calls* FREE?" if parallel else "calls | FREE?"
        announced = self._lark.announced(marker)
        return Grammar(GrammarKind.LARK, f"{start}\namid: {amid}\n{announced}\n{rules}\n")

    def calls_or(
        self,
        grammar: Grammar,
        tools: Sequence[assistant.Tool],
        *,
        parallel: bool,
        prompt_text: str | None,
    ) -> Grammar:
        """The grammar of a message that either calls one of these tools (`calls_grammar`) or has
        content that matches `grammar`, but never both. If free text is not searched for calls, only
        content is possible.
        """
        if not tools or not self._reads_free_calls:
            return self.after_thinking(grammar, prompt_text=prompt_text)
        rules = self._tools.rules(self._lark, tools, parallel=parallel)
        start = self._thinking_before("answer", prompt_text) or "start: answer"
        content = embedded("content", grammar)
        text = f"{start}\nanswer: calls | content\n{rules}\n{content}\n"
        return Grammar(GrammarKind.LARK, text)

    def after_thinking(self, grammar: Grammar, *, prompt_text: str | None) -> Grammar:
        """The grammar of a message whose content matches `grammar` and which may think first."""
        start = self._thinking_before("content", prompt_text)
        if start is None:
            return grammar
        return Grammar(GrammarKind.LARK, f"{start}\n{embedded('content', grammar)}\n")

    def _thinking_before(self, rule: str, prompt_text: str | None) -> str | None:
        if self._thinking is None:
            return None
        return self._thinking.before(self._lark, rule, prompt_text)
