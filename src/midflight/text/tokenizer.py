"""The tokenizer of a Hugging Face model folder, with its chat template. It uses only the
`tokenizers` library.

A template is a Jinja program in the folder that writes a conversation as one text. Its environment
has the same filters, globals and block handling as that of `transformers`, so the text is the same.
Templates come from strangers, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from midflight.errors import ModelNotFound, RequestRejected
from midflight.text.byte_tokenizer import byte_letters_to_bytes
from midflight.text.template_loop import (
    OWN_NAMES,
    GoneItem,
    LoopPlace,
    LoopTemplate,
    LoopText,
    NotResumable,
)
from midflight.text.tool_texts import (
    LIST_TOOLS,
    knows_calls,
    knows_tools,
    with_calls_as_text,
    with_tools_as_text,
)
from midflight.types import Json

_ANCHOR = "\ue000"
"""A private-use letter, which no vocabulary joins with others."""

_NAMED_SPECIALS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


_OPEN = "\ue001"
"""Another private-use letter. It marks the place where a message is to be continued."""


class Ending(StrEnum):
    """The end of the prompt of a chat."""

    TURN = "turn"
    """It ends with the generation prompt, which the template writes before the model speaks."""
    PLAIN = "plain"
    """It ends with the last message."""
    OPEN = "open"
    """It ends with the text of the last message, which the model continues."""


class Tokenizer:
    """Turns text into ids and back, and conversations into text. It adds no special token that the
    text does not hold.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.backend = backend
        self.template = template
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest id."""
        self.special_token_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json`, `tokenizer_config.json`, and the end-of-text ids from the model's
        configs.
        """
        backend = _read_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        specials = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
        source = _template_source(folder, config)
        template = None if source is None else ChatTemplate(source, specials)
        return cls(
            backend, template=template, eos_token_ids=_eos_token_ids(folder, backend, specials)
        )

    @cached_property
    def token_bytes(self) -> dict[int, bytes] | None:
        """The bytes of every token of a byte-level vocabulary. It is `None` for vocabularies of
        another kind.
        """
        if type(self.backend.decoder).__name__ != "ByteLevel":
            return None
        letters = byte_letters_to_bytes()
        table: dict[int, bytes] = {}
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            known = [letters[letter] for letter in token if letter in letters]
            if len(known) == len(token):
                table[index] = bytes(known)
            else:
                # The library's decoder writes a token with any foreign letter (some special tokens)
                # as its own UTF-8.
                table[index] = token.encode("utf-8")
        return table

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_after(self, token_id: int, text: str) -> tuple[int, ...]:
        """The ids of a text that follows this token. They lack the blank that some tokenizers
        (SentencePiece) put before a text.
        """
        if not (text and self._adds_a_blank):
            return self.encode(text)
        special = self.backend.id_to_token(token_id) if token_id in self.special_token_ids else None
        return self._encode_behind(special or _ANCHOR, text)

    @cached_property
    def _adds_a_blank(self) -> bool:
        return self._encode_behind(_ANCHOR, "x") != self.encode("x")

    def _encode_behind(self, anchor: str, text: str) -> tuple[int, ...]:
        """The ids of the text alone, tokenised after the anchor. If the ids of the two cannot be
        separated, the text is tokenised by itself.
        """
        lead = self.encode(anchor)
        whole = self.encode(anchor + text)
        if whole[: len(lead)] != lead:
            return self.encode(text)
        return whole[len(lead) :]

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special: bool = False,
        keep: frozenset[int] = frozenset(),
    ) -> str:
        """The text of these ids. Special tokens in `keep` are written even with `skip_special`."""
        if keep and skip_special:
            hidden = self.special_token_ids - keep
            shown = [i for i in token_ids if i not in hidden]
            return self.backend.decode(shown, skip_special_tokens=False)
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        options: Mapping[str, Json] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it. Raises `RequestRejected` if the
        template refuses it.
        """
        if self.template is None:
            raise ModelNotFound(
                "rendering messages: the model folder has no chat template. Add "
                "chat_template.jinja to it, or use text completions."
            )
        return self.template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        options: Mapping[str, Json] | None = None,
        ending: Ending = Ending.TURN,
    ) -> str:
        """The conversation as a prompt that the model continues. Raises `RequestRejected` if the
        template refuses it.
        """
        if ending is not Ending.OPEN:
            return self.render(
                messages, tools=tools, add_generation_prompt=ending is Ending.TURN, options=options
            )
        last = messages[-1]
        marked = {**last, "content": f"{last.get('content') or ''}{_OPEN}"}
        written = self.render([*messages[:-1], marked], tools=tools, options=options)
        text, mark, _ = written.rpartition(_OPEN)
        if not mark:
            raise RequestRejected(
                (
                    "the model's chat template leaves out the last message, so it cannot be "
                    "continued: end with a message of the user."
                ),
                param="messages",
            )
        return text

    def write_on(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        options: Mapping[str, Json] | None = None,
        since: LoopPlace | None = None,
        num_left: int = 0,
    ) -> LoopText:
        """See `ChatTemplate.write_on`."""
        if self.template is None:
            raise NotResumable
        return self.template.write_on(
            messages, tools=tools, options=options, since=since, num_left=num_left
        )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(
            f"loading the tokenizer: {path} does not exist. Name a Hugging Face model folder that "
            "holds tokenizer.json."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelNotFound(
            f"loading the tokenizer: {path} is not a tokenizer ({error}). Save the model folder "
            "again."
        ) from error
    # Files saved during training may carry both; ids must depend on the text alone.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_json(path: Path) -> dict[str, Json]:
    """The object in a file. Empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = cast(Json, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelNotFound(
            f"reading {path}: not JSON ({error}). Save the model folder again."
        ) from error
    if not isinstance(value, dict):
        raise ModelNotFound(
            f"reading {path}: expected a JSON object, found {type(value).__name__}. Save the model "
            "folder again."
        )
    return value


def _special_tokens(*sources: Mapping[str, Json]) -> dict[str, str]:
    """The text of each named special token. The first source that names one wins. Files hold tokens
    as texts or as objects.
    """
    found: dict[str, str] = {}
    for source in sources:
        for name in _NAMED_SPECIALS:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _template_source(folder: Path, config: Mapping[str, Json]) -> str | None:
    """The template in `chat_template.jinja`, else the (default) one in `tokenizer_config.json`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named: dict[str, Json] = {}
        for item in value:
            if isinstance(item, dict) and {"name", "template"} <= item.keys():
                named[str(item["name"])] = item["template"]
        value = named.get("default")
    return value if isinstance(value, str) else None


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, specials: Mapping[str, str]
) -> frozenset[int]:
    """Every id that the tokenizer, `config.json` or `generation_config.json` names as an end of
    text.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        named = value if isinstance(value, list) else [value]
        ids.update(i for i in named if isinstance(i, int))
    text = specials.get("eos_token")
    token = None if text is None else backend.token_to_id(text)
    if token is not None:
        ids.add(token)
    return frozenset(ids)


Message: TypeAlias = Mapping[str, Json]
"""One message of a conversation: `role`, `content` and other fields that the template reads."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

_NUM_PROVED = 4
"""So many texts that a template wrote while it was watched are compared with what it writes by
itself.
"""
_TAKEN = OWN_NAMES | {"self", "tools", "documents", "add_generation_prompt"}
"""The names that no option of a watched template may have."""
_MAX_FAILED = 8
"""A template that could not be watched so many times in a row is not watched any more."""

_MAX_SAID = 500
"""The most letters of a template's error that are passed on. It may quote the conversation."""


class _GenerationBlock(Extension):
    """The block `{% generation %}`. It marks the assistant's part for training tools; here it only
    renders its body.
    """

    tags = {"generation"}  # noqa: RUF012  (the class attribute Jinja reads)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens` are the texts it may name: `bos_token`, `eos_token`,
    ...
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._knows_tools = knows_tools(source)
        self._knows_calls = knows_calls(source)
        self._special_tokens = dict(special_tokens)
        try:
            self._compiled = _ENVIRONMENT.from_string(source)
        except Exception as error:  # a stranger's program: compiling it may fail in any way
            raise ModelNotFound(
                f"compiling the chat template failed: {error}. Correct chat_template in the model "
                "folder."
            ) from error
        self._num_proved = 0
        self._num_failed = 0

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        options: Mapping[str, Json] | None = None,
    ) -> str:
        """The conversation as one text. Raises `RequestRejected` if the template refuses the
        conversation (`raise_exception`) or fails in any other way. Also raises it if the
        conversation holds half a surrogate pair, which no tokenizer can read.

        `options` are names of the template's own, such as `enable_thinking`. If a template would
        leave out tools or their calls, the messages get them as text.
        """
        chat = [self.as_read(message) for message in messages]
        if self._lists(tools, options):
            chat = with_tools_as_text(chat, tools or ())
        try:
            text = self._compiled.render(
                **{**(options or {}), **self._special_tokens},
                messages=chat,
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            text.encode("utf-8")
        except Exception as error:
            # The template is a stranger's program: it may fail in any way, at the cost of one
            # request.
            raise RequestRejected(
                (
                    f"the model's chat template refused the messages: {_told(error)}. Change them "
                    "to what it expects."
                ),
                param="messages",
            ) from error
        return text

    def write_on(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        options: Mapping[str, Json] | None = None,
        since: LoopPlace | None = None,
        num_left: int = 0,
    ) -> LoopText:
        """The same text as `render` gives with a generation prompt, and the place where the template
        can go on once there are other messages in place of the last `num_left`, and more. With
        `since`, the place of a conversation with the same beginning, tools and options, only the
        text from there on is written. Old messages may then be `GoneItem`.

        Raises `NotResumable` if only `render` can say what the text is.
        """
        loop = self._loop
        if loop is None or self._num_failed >= _MAX_FAILED:
            raise NotResumable
        if options and not _TAKEN.isdisjoint(options):
            raise NotResumable
        chat = _ItemsAsRead(self, messages, tools if self._lists(tools, options) else None)
        values: dict[str, object] = {
            **(options or {}),
            **self._special_tokens,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            until = len(chat) - num_left - 1
            found = loop.render(chat, values, since=since, until=until, clock=_strftime_now)
            found.text.encode("utf-8")
        except jinja2.TemplateError as error:  # most likely it refuses the conversation
            raise NotResumable from error
        except Exception as error:
            self._num_failed += 1
            raise NotResumable from error
        if since is None and self._num_proved < _NUM_PROVED:
            self._num_proved += 1
            plain = self.render(messages, tools=tools, options=options, add_generation_prompt=True)
            if found.text != plain:
                self._num_failed = _MAX_FAILED
                raise NotResumable
        self._num_failed = 0
        return found

    @cached_property
    def _loop(self) -> LoopTemplate | None:
        try:
            return LoopTemplate(_ENVIRONMENT, self.source)
        except Exception:  # it uses the inside of Jinja, which another release may change
            return None

    def _lists(self, tools: Sequence[Message] | None, options: Mapping[str, Json] | None) -> bool:
        """True if the messages must name the tools, because the template would leave them out."""
        if not tools or self._knows_tools:
            return False
        return (options or {}).get(LIST_TOOLS) is not False

    def as_read(self, message: Message) -> dict[str, Json]:
        """A message as this template reads it."""
        read = as_templates_read(message)
        return read if self._knows_calls else with_calls_as_text(read)


class _ItemsAsRead(Sequence[Message]):
    """A conversation as its template reads it. A message is brought into that form when it is
    looked at.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> None:
        """`tools` are those that the messages must name."""
        self._template = template
        self._messages = messages
        self._first: list[dict[str, Json]] = []
        """The messages that take the place of the first one."""
        if tools:
            first = [template.as_read(messages[0])] if len(messages) else []
            self._first = with_tools_as_text(first, tools)
        self._more = max(0, len(self._first) - 1)

    def __len__(self) -> int:
        return len(self._messages) + self._more

    def __getitem__(self, index: Any) -> Any:
        place: int = index
        if place < len(self._first):
            return self._first[place]
        message = self._messages[place - self._more]
        return message if isinstance(message, GoneItem) else self._template.as_read(message)


def as_templates_read(message: Message) -> dict[str, Json]:
    """A message in the form that templates expect, from the form that clients send.

    Arguments of tool calls become objects if their text is one, because templates write them with
    `tojson`. Reasoning is there under each name that templates know. An assistant's content is a
    text, never `None`. All other fields stay as they were sent.
    """
    read = _with_reasoning_names(message)
    if read.get("role") == "assistant" and read.get("content") is None:
        read["content"] = ""
    calls = read.get("tool_calls")
    if isinstance(calls, list):
        read["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return read


def _with_parsed_arguments(call: Json) -> Json:
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    text = function.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = cast(Json, json.loads(text))
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning_names(message: Message) -> dict[str, Json]:
    """The message with its reasoning under each name that templates read (`reasoning_content`, and
    gpt-oss's `thinking`).
    """
    for name in _REASONING_NAMES:
        reasoning = message.get(name)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return dict(message)


def _told(error: Exception) -> str:
    """The template's own message, or the name and text of an error inside it, cut and writable as
    UTF-8.
    """
    said = str(error)
    if not isinstance(error, jinja2.TemplateError):
        said = f"{type(error).__name__}: {said}"
    return said[:_MAX_SAID].encode("utf-8", "replace").decode()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own filter escapes HTML, which a model never saw."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    """The calendar date, which some templates print in their system message."""
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControls]
    )
    environment.filters["tojson"] = _to_json
    names = cast(dict[str, object], environment.globals)
    names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _environment()
