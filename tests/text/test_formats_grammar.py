"""Forced calls: what llguidance lets through is what the parser reads, and nothing else is let through."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.text.written import CLOCK, MISTRAL_NAMED, WEATHER, model

from midflight.errors import RequestRejected
from midflight.text import Tokenizer
from midflight.text.byte_tokenizer import END
from midflight.text.formats import MessageFormat, Tool
from midflight.types import Grammar, GrammarKind

MARKERS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "</think>", "[THINK]", "[/THINK]"]
LETTERS, SPECIAL, ADDED = model(), model(None, MARKERS), model(None, added=MARKERS)
TOKENIZERS = {"letters": LETTERS, "special": SPECIAL, "added": ADDED}
KIN = {name: LLTokenizer(tokenizer.backend.to_str(), eos_token=END) for name, tokenizer in TOKENIZERS.items()}
PROMPTS = {"none": "x", "think": "x<think>\n", "mistral": "x[THINK]"}
THOUGHTS = {"none": "", "think": "So </th {}\n</think>\n\n", "mistral": "So [/TH {}[/THINK]"}

FULL = '{"city": "Os\\"lo</tool_call>", "unit": "F", "days": -3, "at": {"x": 1.5}}'


def accepts(which: str, grammar: Grammar, text: str) -> bool:
    assert grammar.kind is GrammarKind.LARK
    matcher = LLMatcher(KIN[which], LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    ids = list(TOKENIZERS[which].encode(text))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def one(tools: str, name: str, arguments: str) -> str:
    forms = {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]',
        "qwen_coder": f"<tool_call>\n<function={name}>\n{tagged(arguments)}</function>\n</tool_call>",
    }
    return forms[tools]


def tagged(arguments: str) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in json.loads(arguments).items()}
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())


FORMS = ["hermes", "llama3", "mistral", "qwen_coder"]


@pytest.mark.parametrize("tools", FORMS)
@pytest.mark.parametrize("reasoning", PROMPTS)
@pytest.mark.parametrize("which", TOKENIZERS)
def test_a_forced_call_is_let_through_and_read_back(tools: str, reasoning: str, which: str) -> None:
    form = MessageFormat(TOKENIZERS[which], tools=tools, reasoning=reasoning)
    prompt = PROMPTS[reasoning]
    grammar = form.calls_grammar([WEATHER, CLOCK], parallel=False, prompt_text=prompt)
    for name, arguments in (("weather", FULL.replace("</tool_call>", "")), ("weather", '{"city": ""}'), ("clock", "{}")):
        text = THOUGHTS[reasoning] + one(tools, name, arguments)
        assert accepts(which, grammar, text), text
        message = form.parse(text, prompt, calls=True, tools=[WEATHER, CLOCK])
        assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [(name, json.loads(arguments))]
        assert message.content == "" and message.reasoning == THOUGHTS[reasoning].partition("\n")[0].removesuffix("[/THINK]")


@pytest.mark.parametrize("tools", FORMS)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("whether", '{"city": "Oslo"}'),
        ("weather", "{}"),
        ("weather", '{"city": "Oslo", "days": "two"}'),
        ("weather", '{"city": "Oslo", "unit": "K"}'),
        ("weather", '{"city": "Oslo", "at": {"x": "here"}}'),
        ("weather", '{"city": "Oslo", "at": {}}'),
        ("weather", '{"city": "Oslo", "planet": "Mars"}'),
    ],
)
def test_a_wrong_name_or_argument_is_not_let_through(tools: str, name: str, arguments: str) -> None:
    grammar = MessageFormat(LETTERS, tools=tools).calls_grammar([WEATHER, CLOCK], parallel=True, prompt_text="x")
    assert accepts("letters", grammar, one(tools, "weather", '{"city": "Oslo"}'))
    assert not accepts("letters", grammar, one(tools, name, arguments))


@pytest.mark.parametrize("tools", FORMS)
def test_nothing_is_said_beside_a_forced_call(tools: str) -> None:
    grammar = MessageFormat(LETTERS, tools=tools).calls_grammar([CLOCK], parallel=True, prompt_text="x")
    call = one(tools, "clock", "{}")
    assert accepts("letters", grammar, call)
    for text in ("", "hello", f"Well: {call}", f"{call} there", call[:-1]):
        assert not accepts("letters", grammar, text)


BOTH = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"city": "a"}}',
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"city": "a"}}]',
    "qwen_coder": (
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("tools", FORMS)
@pytest.mark.parametrize("which", TOKENIZERS)
def test_several_calls_are_let_through_only_in_parallel(tools: str, which: str) -> None:
    form = MessageFormat(TOKENIZERS[which], tools=tools)
    assert accepts(which, form.calls_grammar([WEATHER, CLOCK], parallel=True, prompt_text="x"), BOTH[tools])
    assert not accepts(which, form.calls_grammar([WEATHER, CLOCK], parallel=False, prompt_text="x"), BOTH[tools])
    assert [c.name for c in form.parse(BOTH[tools], "x", calls=True).tool_calls] == ["clock", "weather"]


@pytest.mark.parametrize("special", [[], ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]])
def test_a_mistral_that_writes_names_is_forced_to_do_so(special: list[str]) -> None:
    tokenizer = model(MISTRAL_NAMED, special)
    TOKENIZERS["named"], KIN["named"] = tokenizer, LLTokenizer(tokenizer.backend.to_str(), eos_token=END)
    form = MessageFormat(tokenizer)
    text = '[THINK]a[/THINK][TOOL_CALLS]weather[ARGS]{"city": "a"}[TOOL_CALLS]clock[ARGS]{}'
    assert accepts("named", form.calls_grammar([WEATHER, CLOCK], parallel=True, prompt_text="x"), text)
    assert not accepts("named", form.calls_grammar([WEATHER, CLOCK], parallel=True, prompt_text="x"), text.replace("clock", "click"))
    assert [c.name for c in form.parse(text, "x", calls=True).tool_calls] == ["weather", "clock"]


def test_a_value_between_tags_may_hold_half_a_marker() -> None:
    form = MessageFormat(LETTERS, tools="qwen_coder")
    text = "<tool_call>\n<function=weather>\n<parameter=city>\n</param\n</para\n</parameter>\n</function>\n</tool_call>"
    assert accepts("letters", form.calls_grammar([WEATHER], parallel=False, prompt_text="x"), text)
    (call,) = form.parse(text, "x", calls=True, tools=[WEATHER]).tool_calls
    assert json.loads(call.arguments) == {"city": "</param\n</para"}


@pytest.mark.parametrize("name", ['a"b', "é", "a\\b", "a/b"])
def test_a_name_of_any_letters_is_written_as_json_writes_it(name: str) -> None:
    form = MessageFormat(LETTERS)
    grammar = form.calls_grammar([Tool(name)], parallel=False, prompt_text="x")
    text = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{}}}}\n</tool_call>'
    assert accepts("letters", grammar, text)
    assert [c.name for c in form.parse(text, "x", calls=True).tool_calls] == [name]


def test_thinking_may_come_before_a_forced_call_unless_the_prompt_closed_it() -> None:
    form = MessageFormat(LETTERS, reasoning="think")
    call = one("hermes", "clock", "{}")
    thought = f"<think>\na\n</think>\n\n{call}"
    for prompt, bare, block, rest in [
        ("x", True, True, False),
        (None, True, True, False),
        ("x<think>\n", False, True, True),
        ("x<think>\n\n</think>\n\n", True, False, False),
    ]:
        grammar = form.calls_grammar([CLOCK], parallel=False, prompt_text=prompt)
        found = [accepts("letters", grammar, text) for text in (call, thought, thought.removeprefix("<think>"))]
        assert found == [bare, block, rest], prompt


def test_a_call_needs_a_tool() -> None:
    with pytest.raises(RequestRejected, match="no tool"):
        MessageFormat(LETTERS).calls_grammar([], parallel=True, prompt_text="x")


GRAMMARS = [
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}}'), '{"a": 1}', '{"a": "1"}'),
    (Grammar(GrammarKind.REGEX, r"a/b\/[c/]|x"), "a/b//", "a/bc"),
    (Grammar(GrammarKind.REGEX, "a\nb|c"), "a\nb", "ab"),
    (Grammar(GrammarKind.LARK, 'start: "{" word "}"\nword: /[a-z]+/'), "{ab}", "{}"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GRAMMARS)
@pytest.mark.parametrize("which", ["letters", "special"])
def test_a_response_format_holds_after_thinking(grammar: Grammar, good: str, bad: str, which: str) -> None:
    form = MessageFormat(TOKENIZERS[which], reasoning="think")
    opened = form.after_thinking(grammar, prompt_text="x<think>\n")
    unopened = form.after_thinking(grammar, prompt_text="x")
    assert accepts(which, opened, f"a\n</think>\n\n{good}") and not accepts(which, opened, f"a\n</think>\n\n{bad}")
    assert not accepts(which, opened, good)
    assert accepts(which, unopened, f"<think>a</think>{good}") and accepts(which, unopened, good)
    assert not accepts(which, unopened, f"<think>a</think>{bad}") and not accepts(which, unopened, bad)


def test_an_answer_after_thinking_cannot_be_blanks_without_end() -> None:
    grammar = MessageFormat(LETTERS, reasoning="think").after_thinking(GRAMMARS[0][0], prompt_text="x<think>")
    assert accepts("letters", grammar, 'a</think>{"a":' + " " * 40 + "1}")
    assert not accepts("letters", grammar, 'a</think>{"a":' + " " * 41 + "1}")


def test_a_response_format_stays_as_it_is_where_no_thinking_comes() -> None:
    grammar = GRAMMARS[0][0]
    assert MessageFormat(LETTERS, reasoning="none").after_thinking(grammar, prompt_text="x<think>\n") is grammar
    assert MessageFormat(LETTERS, reasoning="think").after_thinking(grammar, prompt_text="<think>\n\n</think>\n\n") is grammar


def test_a_marker_that_is_a_token_is_written_as_that_token_and_not_in_letters() -> None:
    """Qwen's markers are tokens but not special; llguidance lets no text be written with them."""

    def text(tokenizer: Tokenizer) -> str:
        return MessageFormat(tokenizer, tools="hermes", reasoning="think").calls_grammar([CLOCK], parallel=False, prompt_text="x").text

    for tokenizer in (SPECIAL, ADDED):
        assert "<[262]>" in text(tokenizer) and "<[263]>" in text(tokenizer) and "tool_call>" not in text(tokenizer)
    assert "<[" not in text(LETTERS)


NUMBER = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')


@pytest.mark.parametrize("tools", FORMS)
@pytest.mark.parametrize("reasoning", PROMPTS)
@pytest.mark.parametrize("which", TOKENIZERS)
def test_an_answer_is_calls_or_matches_the_response_format(tools: str, reasoning: str, which: str) -> None:
    form, prompt, thought = MessageFormat(TOKENIZERS[which], tools=tools, reasoning=reasoning), PROMPTS[reasoning], THOUGHTS[reasoning]
    grammar = form.calls_or(NUMBER, [WEATHER, CLOCK], parallel=True, prompt_text=prompt)
    call = one(tools, "weather", '{"city": "Oslo"}')
    for text, names, content in [(call, ["weather"], ""), (BOTH[tools], ["clock", "weather"], ""), ('{"a": 1}', [], '{"a": 1}')]:
        assert accepts(which, grammar, thought + text), text
        message = form.parse(thought + text, prompt, calls=True, tools=[WEATHER, CLOCK])
        assert ([c.name for c in message.tool_calls], message.content) == (names, content)
    for text in ("", "hello", '{"a": "1"}', '{"b": 1}', f'{call}{{"a": 1}}', f'{{"a": 1}}{call}', one(tools, "whether", "{}"), call[:-1]):
        assert not accepts(which, grammar, thought + text), text


@pytest.mark.parametrize("tools", FORMS)
@pytest.mark.parametrize("which", TOKENIZERS)
def test_beside_a_response_format_too_several_calls_are_let_through_only_in_parallel(tools: str, which: str) -> None:
    grammar = MessageFormat(TOKENIZERS[which], tools=tools).calls_or(NUMBER, [WEATHER, CLOCK], parallel=False, prompt_text="x")
    assert accepts(which, grammar, one(tools, "clock", "{}")) and not accepts(which, grammar, BOTH[tools])


@pytest.mark.parametrize(("format_", "good", "bad"), GRAMMARS)
@pytest.mark.parametrize("tools", FORMS)
def test_a_response_format_of_any_kind_may_stand_beside_tools(tools: str, format_: Grammar, good: str, bad: str) -> None:
    grammar = MessageFormat(LETTERS, tools=tools, reasoning="think").calls_or(format_, [CLOCK], parallel=True, prompt_text="x")
    assert accepts("letters", grammar, f"<think>a</think>{good}") and accepts("letters", grammar, good)
    assert accepts("letters", grammar, one(tools, "clock", "{}"))
    assert not accepts("letters", grammar, bad)


NAMED = [
    ('{"type": "object"}', ['{"name": "bob"}', '{"name": "clock", "x": 1}', "{}"]),
    (
        '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": false}',
        ['{"name": "bob"}'],
    ),
]


@pytest.mark.parametrize(("schema", "contents"), NAMED)
def test_a_response_that_begins_as_a_bare_call_does_stays_possible_and_so_does_a_call(schema: str, contents: list[str]) -> None:
    """Llama may write calls without a marker; after its tag there is no doubt."""
    form = MessageFormat(LETTERS, tools="llama3")
    grammar = form.calls_or(Grammar(GrammarKind.JSON_SCHEMA, schema), [WEATHER, CLOCK], parallel=True, prompt_text="x")
    for content in contents:
        assert accepts("letters", grammar, content)
        assert form.parse(content, "x", calls=True).content == content
    assert accepts("letters", grammar, f"<|python_tag|>{one('llama3', 'clock', '{}')}")


def test_only_the_response_format_is_left_where_no_call_would_be_read() -> None:
    for form, tools in ((MessageFormat(LETTERS, tools="none", reasoning="none"), [CLOCK]), (MessageFormat(LETTERS, reasoning="none"), [])):
        assert form.calls_or(NUMBER, tools, parallel=True, prompt_text="x") is NUMBER


ANNOUNCED = ["hermes", "mistral", "qwen_coder"]


@pytest.mark.parametrize("tools", ANNOUNCED)
@pytest.mark.parametrize("reasoning", PROMPTS)
@pytest.mark.parametrize("which", TOKENIZERS)
def test_amid_free_text_calls_follow_their_schema_and_are_read_back(tools: str, reasoning: str, which: str) -> None:
    form = MessageFormat(TOKENIZERS[which], tools=tools, reasoning=reasoning)
    prompt, thought = PROMPTS[reasoning], THOUGHTS[reasoning]
    grammar = form.calls_amid_text([WEATHER, CLOCK], parallel=True, prompt_text=prompt)
    good, other = one(tools, "weather", '{"city": "Oslo"}'), one(tools, "clock", "{}")
    for text, names in [
        ("", []),
        ("Just < text [and] </tool", []),
        (good, ["weather"]),
        (f"Well, {good}", ["weather"]),
        (f"{good}\n{other}", ["weather", "clock"]),
        (f"So.\n{other} and {good} now", ["clock", "weather"]),
    ]:
        assert accepts(which, grammar, thought + text), text
        message = form.parse(thought + text, prompt, calls=True, tools=[WEATHER, CLOCK])
        assert [call.name for call in message.tool_calls] == names
    for text in [
        one(tools, "weather", '{"days": 1}'),
        one(tools, "other", "{}"),
        f"{good} then {one(tools, 'weather', '{}')}",
        f"I would write {form._tools.opening} here",
        good[:-1],
    ]:
        assert not accepts(which, grammar, thought + text), text


@pytest.mark.parametrize("tools", ANNOUNCED)
def test_amid_free_text_without_parallel_calls_one_may_come(tools: str) -> None:
    form, good = MessageFormat(LETTERS, tools=tools), one(tools, "weather", '{"city": "Oslo"}')
    grammar = form.calls_amid_text([WEATHER], parallel=False, prompt_text="x")
    assert accepts("letters", grammar, f"So {good}") and accepts("letters", grammar, "So")
    assert not any(accepts("letters", grammar, text) for text in (f"{good}\n{good}", f"{good} done", one(tools, "clock", "{}")))


def test_a_form_that_announces_no_calls_says_so() -> None:
    assert [MessageFormat(LETTERS, tools=tools).announces_calls for tools in (*ANNOUNCED, "llama3", "none")] == [True] * 3 + [False] * 2
