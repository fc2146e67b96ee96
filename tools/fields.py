"""docs/fields.md, made from the bodies that the gateway parses and from the errors that it answers
with: `python tools/fields.py docs/fields.md`.

Which fields there are, of which type, in which range, what is ignored and what is refused is read
from the code; a sentence says what becomes of each field. A field without a sentence is an error
here, so none is forgotten.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel

from midflight.errors import Blame, MidflightError
from midflight.gateway.dialects import unread_fields
from midflight.gateway.dialects.contents_input import (
    DeclaredTools,
    FunctionCallingConfig,
    FunctionDeclaration,
    GenerationConfig,
    ToolConfig,
)
from midflight.gateway.dialects.messages_input import ClientTool, OutputConfig, ThinkingBody
from midflight.gateway.dialects.native import NativeSampling
from midflight.gateway.dialects.responses_input import ReasoningBody
from midflight.gateway.dialects.tool_bodies import FunctionTool
from midflight.gateway.http.openapi import DESCRIBED
from midflight.types.generation import PARAMETERS, Api, Parameter

INTRODUCTION = """# Fields of requests

*A page to look things up in.*

Made from the code by `python tools/fields.py docs/fields.md`; edit the sentences there. [gateway.md](gateway.md) says what all routes have in common, and `GET /openapi.json` has the types. `model` must be the name of the served model, else the answer is 404. In Google's API the address names it. A field that is not on this page is passed over, or refused if its name is close to a sampling parameter's.
"""
SAMPLING = """
## Sampling, in every dialect

Names in camel case are Google's, in `generationConfig`; native ones are in `sampling_params`. *Masked* means that another value than the default keeps the turn out of the loss. What *truncates* does so on [some engines](algorithms.md#truncated-sampling). Where an engine [lacks](engines.md#what-each-kind-can) {features}, these are refused.

| field | values; **default** |
|---|---|
"""
NOTES: Mapping[str, str] = {
    "temperature": "0 is greedy, more begins at 0.0001",
    "top_k": "0 and -1 keep all tokens",
    "logit_bias": "token id to -100 to 100; 300 ids at most",
    "seed": "choice k has seed + k; refused where an engine honours none",
    "stop": "16 strings at most; never shown, not even in part",
    "stop_token_ids": "token ids",
    "max_tokens": (
        "**the room in the context, in completions 16, native 128**; more than the room is lowered "
        "to it (`x-midflight-clamped`), or refused with `gateway.strict`"
    ),
}
DIALECTS = {Api.OPENAI: "", Api.ANTHROPIC: "in messages ", Api.GOOGLE: "", Api.NATIVE: "native "}
"""The words before a name that another dialect has not."""
MAX_TOKENS = (
    "`max_tokens`, in chats also `max_completion_tokens`, in responses `max_output_tokens`, "
    "`maxOutputTokens`, native `max_new_tokens`"
)
"""The names of a limit that each of OpenAI's routes reads in its own way."""
GRAMMARS = {
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
}
KINDS = ("sampling", "grammars")
"""Words for fields that have a place of their own on the page, or on the gateway's."""
WITHOUT_A_ROW = {"model", "n", "max_output_tokens"}
"""Fields that the head of the page, the table of sampling or the gateway's page explains."""
GENERATE_CONTENT = "/v1beta/models/{model}:generateContent"
TABLES: Mapping[str, str] = {
    "/v1/messages/count_tokens": "/v1/messages",
    "/v1beta/models/{model}:streamGenerateContent": GENERATE_CONTENT,
    "/v1beta/models/{model}:countTokens": GENERATE_CONTENT,
}
"""The routes whose fields are in the table of another one."""
SENTENCES: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {
        "messages": "[roles and parts](gateway.md#chat-completions)",
        "max_tokens, max_completion_tokens": "one limit; two different values are refused",
        (
            "response_format, structured_outputs, guided_json, guided_regex, guided_choice, "
            "guided_grammar"
        ): "one of them: a [grammar](gateway.md#grammars)",
        "logprobs, top_logprobs": "the second, 0 to 20 alternatives, only with the first",
        "prompt_logprobs": (
            "0 to 20 alternatives for each token of the prompt, if the engine can score prompts"
        ),
        "tools": (
            "1024 at most, of type `function` or `custom` (a function of one text); other types are "
            "left out. A name is unique and has 1 to 64 letters (A-Z, a-z, 0-9, `_`, `-`); "
            "`parameters` are a schema of an object. `strict` makes calls [follow "
            "it](tools.md#forced-calls)"
        ),
        "tool_choice": (
            "`none`, `auto`, `required`, one function, or `allowed_tools`: only those are in the "
            "prompt. With `none` tools stay in the prompt, and what looks like a call is content"
        ),
        "parallel_tool_calls": "`false` ends the answer with its first call",
        "chat_template_kwargs": (
            "options of the model's template; names that the gateway fills in, such as `messages`, "
            "are refused"
        ),
        "reasoning_effort": (
            "an option of the template: `none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`"
        ),
        "verbosity, enable_thinking, thinking, reasoning": (
            "options of the template too: `thinking` is true, false, or has the `type` `enabled` or "
            "`disabled`; `reasoning` has `effort` and `enabled`"
        ),
        "continue_final_message, add_generation_prompt": (
            "the first true: the answer goes on with the last message's text; the second false: the "
            "prompt ends with the last message. Neither is ever trained"
        ),
        "stream, stream_options": (
            "`include_usage` and `continuous_usage_stats` are honoured; `include_obfuscation` is ignored"
        ),
        "return_token_ids": "adds `prompt_token_ids`, `token_ids` and `weight_versions`",
        "return_tokens_as_token_ids": "tokens in log-probabilities are `token_id:` and the number",
    },
    "/v1/completions": {
        "prompt": "a text, token ids, or a list of either",
        "max_tokens": "0 only with `echo` or `prompt_logprobs`",
        "logprobs": "0 to 20 alternatives, and the sampled token: the four parallel lists",
        "echo": (
            "the prompt before the answer; with `logprobs` it is scored, as for `prompt_logprobs`"
        ),
        "best_of": "refused unless it is `n`",
        (
            "sampling, grammars, prompt_logprobs, stream, stream_options, return_token_ids, "
            "return_tokens_as_token_ids"
        ): "as in chats",
    },
    "/generate": {
        "text, input_ids": "exactly one of them, one prompt or a list",
        "sampling_params": (
            "for all prompts; also `n`, and for [grammars](gateway.md#grammars) `json_schema`, "
            "`regex` and `ebnf`"
        ),
        "rid": "names the request for an abort; of several answers each appends its number",
        "return_logprob, top_logprobs_num": (
            "`output_token_logprobs`, and with these 0 to 20 `output_top_logprobs`"
        ),
        "return_text_in_logprobs": "honoured",
        "skip_special_tokens, no_stop_trim": (
            "in `sampling_params`: the text holds special tokens, or what ended the answer"
        ),
        "spaces_between_special_tokens, stop_regex": (
            "in `sampling_params`: the first changes nothing, the second must be empty"
        ),
        "logprob_start_len": (
            "from 0 on, with `return_logprob`: `input_token_logprobs` from there, if the engine can "
            "score prompts; -1 is none"
        ),
        "stream": "each frame says all so far",
    },
    "/inference/v1/generate": {
        "token_ids": "one prompt",
        "sampling_params": (
            "under the names of chats, with `n`, `max_tokens`, `logprobs`, `prompt_logprobs` and "
            "`structured_outputs`; what is about text is ignored"
        ),
        "request_id": "names the request for an abort",
        "return_token_ids": "adds `prompt_token_ids`",
        "output_mode": "`tokens` only",
        "stream, stream_options": "as in chats",
    },
    "/v1/responses": {
        "input, instructions": "[items](responses.md#input)",
        "tools": (
            "as in chats, and of type `namespace`; `custom` calls come back as `custom_tool_call`"
        ),
        "tool_choice": (
            'as in chats; a function is `{"type": "function", "name": ...}`, a `custom` tool alike'
        ),
        "text.format": (
            "`text`, `json_object` or `json_schema`, instead of a grammar as in chats; [with "
            "tools](gateway.md#chat-completions) the answer may be calls instead"
        ),
        "text.verbosity, reasoning.effort": (
            "the template's options `verbosity` and `reasoning_effort`"
        ),
        "reasoning.summary": "stays empty: `content` has all of the reasoning",
        "include": (
            "`message.output_text.logprobs`; `reasoning.encrypted_content` changes nothing; others "
            "are passed over"
        ),
        "top_logprobs": "0 to 20 alternatives; asks for log-probabilities too",
        "truncation": "`auto` is passed over: an input that does not fit is refused",
        "previous_response_id, conversation": (
            "what the request goes on from, if it [is kept](responses.md#what-is-kept); else 404"
        ),
        "store": "`false`: the response is not kept",
        "metadata, user, safety_identifier, prompt_cache_key": "given back, otherwise ignored",
        "prompt, background, n, response_format": (
            "refused, with what to send instead; `background` may be false, `n` 1"
        ),
        (
            "sampling, grammars, parallel_tool_calls, chat_template_kwargs, enable_thinking, stream, "
            "stream_options, return_token_ids, return_tokens_as_token_ids"
        ): "as in chats",
    },
    "/v1/messages": {
        "max_tokens": "required; bounds thinking and text together",
        "messages": "[blocks](messages.md#messages) of `user`, `assistant` and `system`",
        "system": "a text or blocks of text: the first message of the chat",
        "temperature, top_p, top_k, stop_sequences, seed, min_p, min_tokens": (
            "[as above](#sampling-in-every-dialect); what an SDK lacks goes into its `extra_body`"
        ),
        "stream": "[events](messages.md#answers) instead of one message",
        "tools": "`name`, `description`, `input_schema`; `strict` as in chats",
        "tool_choice": (
            "`none`, `auto`, and under a grammar `any`, or `tool` with a `name`. "
            "`disable_parallel_tool_use` ends the answer with its first call"
        ),
        "thinking": (
            "`enabled` and `disabled` are the template's option `enable_thinking`, `adaptive` leaves "
            "it to the template"
        ),
        "output_config, output_format": (
            "`format` (`output_format` is its older name) with a JSON schema: the answer is sampled "
            "under it, or [calls a tool](gateway.md#chat-completions). `effort` is the template's "
            "`reasoning_effort`"
        ),
        "thread": "refused; the SDK's tool runner then sends the whole conversation",
        "return_token_ids": (
            "as in chats, by `extra_body`; in a stream the first comes with `message_start`, the "
            "others with `message_delta`"
        ),
    },
    GENERATE_CONTENT: {
        "contents": "[parts](contents.md#contents) of `user`, `model` and `function`",
        "systemInstruction": "text parts: the first message of the chat",
        "tools": (
            "`functionDeclarations`: `name`, `description`, and `parameters` as Google writes "
            "schemas, or `parametersJsonSchema`"
        ),
        "toolConfig": (
            "`functionCallingConfig`: `mode` is `NONE`, `AUTO`, `VALIDATED` (as `AUTO`), or `ANY`, "
            "which samples the call under a grammar. Only `allowedFunctionNames` are in the prompt"
        ),
        "generationConfig": "{google} and the fields below",
        "generationConfig.candidateCount": "choices; 1024 at most",
        "generationConfig.responseMimeType": (
            "`text/plain`; `application/json`, under the schema if there is one; `text/x.enum`: one "
            "of the schema's `enum`"
        ),
        "generationConfig.responseSchema, generationConfig.responseJsonSchema": (
            "one of them: what the answer must match, as Google writes schemas or as JSON schema. "
            "[With tools](gateway.md#chat-completions) it may be calls instead"
        ),
        "generationConfig.responseLogprobs, generationConfig.logprobs": (
            "the second, 0 to 20 alternatives, only with the first"
        ),
        "generationConfig.thinkingConfig": (
            "`includeThoughts`: thoughts are told. `thinkingBudget`, 0 or more, is the template's "
            "option `enable_thinking`, -1 leaves it to the template; `thinkingLevel` is "
            "`reasoning_effort`"
        ),
        "returnTokenIds": (
            "as `return_token_ids` in chats, by `extra_body`; in a stream at the end"
        ),
        "generateContentRequest": (
            "in `:countTokens`, in the place of `contents`: a whole request"
        ),
    },
}


def page() -> str:
    """The page, as Markdown."""
    parts = [INTRODUCTION, *_sampling()]
    for path, described in DESCRIBED.items():
        _check(path, described.body)
        if path in SENTENCES:
            parts += [f"\n## `POST {path}`\n\n", *_table(SENTENCES[path])]
    return "".join([*parts, *_not_read(), *_errors()])


def _sampling() -> Iterator[str]:
    named = [parameter for parameter in PARAMETERS.values() if parameter.names]
    features = dict.fromkeys(p.feature.value for p in named if p.feature is not None)
    yield SAMPLING.format(features=" or ".join(features))
    for values, alike in groupby(named, _values):
        yield _row(", ".join(_names(parameter) for parameter in alike), values)


def _names(parameter: Parameter) -> str:
    """The names in all dialects. One that is another dialect's too is not said again."""
    if parameter.name == "max_tokens":
        return MAX_TOKENS
    found: dict[str, str] = {}
    for api, words in DIALECTS.items():
        if name := parameter.names.get(api):
            found.setdefault(name, f"{words}`{name}`")
    return ", ".join(found.values())


def _values(parameter: Parameter) -> str:
    said: list[str] = []
    if parameter.range is not None:
        shown = str(parameter.range).removeprefix("from ").replace("2147483647", "2^31 - 1")
        said.append(shown.replace("18446744073709551615", "2^64 - 1"))
    if parameter.default not in (None, ()) and parameter.name not in ("max_tokens", "seed"):
        said.append(f"**{json.dumps(parameter.default)}**")
    if note := NOTES.get(parameter.name):
        said.append(note)
    if parameter.reshapes:
        said.append("truncates" if parameter.truncates else "masked")
    return "; ".join(said)


def _table(sentences: Mapping[str, str]) -> Iterator[str]:
    yield "| field | what becomes of it |\n|---|---|\n"
    google = [
        f"`{name}`" for p in PARAMETERS.values() if (name := p.names.get(Api.GOOGLE)) is not None
    ]
    for key, sentence in sentences.items():
        names = [each if each in KINDS else f"`{each}`" for each in key.split(", ")]
        yield _row(", ".join(names), sentence.replace("{google}", ", ".join(google)))


def _check(path: str, body: type[BaseModel]) -> None:
    """Ends the program if the page says nothing of a field."""
    table = TABLES.get(path, path)
    spoken_of = (
        {name for key in SENTENCES[table] for name in re.findall(r"[A-Za-z_]+", key)}
        | GRAMMARS
        | WITHOUT_A_ROW
        | unread_fields.IGNORED.keys()
        | _names_of_parameters()
    )
    if missing := {field.alias or name for name, field in body.model_fields.items()} - spoken_of:
        raise SystemExit(f"tools/fields.py says nothing of {sorted(missing)} of {path}")


def _names_of_parameters() -> set[str]:
    return {name for parameter in PARAMETERS.values() for name in parameter.names.values()} | set(
        NativeSampling.model_fields
    )


def _inner() -> Iterator[str]:
    """The fields inside others that are passed over."""
    for body, place in (
        (ClientTool, "tools"),
        (FunctionTool, "tools"),
        (ThinkingBody, "thinking"),
        (OutputConfig, "output_config"),
        (ReasoningBody, "reasoning"),
        (DeclaredTools, "tools"),
        (FunctionDeclaration, "tools.functionDeclarations"),
        (ToolConfig, "toolConfig"),
        (FunctionCallingConfig, "toolConfig.functionCallingConfig"),
        (GenerationConfig, "generationConfig"),
    ):
        for name in {**body.harmless, **body.ignored}:
            yield f"{place}.{name}"


def _not_read() -> Iterator[str]:
    of_messages = unread_fields.HARMLESS_MESSAGES.keys() - unread_fields.HARMLESS.keys()
    of_google = unread_fields.HARMLESS_GOOGLE.keys() - unread_fields.HARMLESS.keys()
    in_thinking = [f"thinking.{name}" for name in ThinkingBody.harmless]
    yield (
        "\n## Passed over\n\nThese fields cannot change the text. The answer's head names them "
        "(`x-midflight-ignored`), and `midflight_ignored_fields` counts them:\n\n"
        f"- Even with `gateway.strict`: {_code({*unread_fields.HARMLESS, *in_thinking})}; in "
        f"messages {_code(of_messages)}; in contents {_code(of_google)}.\n"
        f"- Unless `gateway.strict` refuses them: {_code(unread_fields.IGNORED)}.\n"
        f"- The same inside others: {_code({*_inner()} - {*in_thinking})}.\n\n"
        "Write a tool's examples and results into its description: templates have no place for "
        "them.\n\n"
        f"Tools of these types are left out of the prompt: {_code(unread_fields.TOOLS)}; also with a "
        "date behind, and all unknown types.\n"
    )
    yield (
        "\n## Refused\n\nThey would change the text, or promise what no answer here has. `null` "
        "and the value in brackets, which asks for nothing, are accepted.\n\n"
    )
    yield "| fields | instead |\n|---|---|\n"
    refused: dict[str, list[str]] = {}
    for name in sorted({*unread_fields.NEUTRAL, *unread_fields.REFUSED}):
        neutral = [f"`{json.dumps(value)}`" for value in unread_fields.NEUTRAL.get(name, ())]
        accepted = f" ({' or '.join(neutral)})" if neutral else ""
        instead = unread_fields.REFUSED[name].removesuffix(" instead")
        refused.setdefault(instead, []).append(f"`{name}`{accepted}")
    for instead, names in refused.items():
        yield _row(", ".join(names), instead)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _errors() -> Iterator[str]:
    """By status. Those for which trying again can help are in bold."""
    yield "\n## Errors\n\nWhere trying again can help (in bold) there is `Retry-After`.\n\n"
    yield "| status | `code` |\n|---|---|\n"
    found: dict[int, set[str]] = {}
    for error in _answered(MidflightError):
        code = f"**`{error.code}`**" if error.retryable else f"`{error.code}`"
        found.setdefault(error.status, set()).add(code)
    for status, codes in sorted(found.items()):
        yield _row(str(status), ", ".join(sorted(codes)))


def _answered(error: type[MidflightError]) -> Iterator[type[MidflightError]]:
    """Those that clients are told; other errors are 500."""
    if error.status != MidflightError.status and error.blame is not Blame.CONFIG:
        yield error
    for inner in error.__subclasses__():
        if inner.__module__ == MidflightError.__module__:
            yield from _answered(inner)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="what is written, such as docs/fields.md")
    parser.parse_args().page.write_text(page())


if __name__ == "__main__":
    main()
