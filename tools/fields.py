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
from collections.abc import Iterator, Mapping
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

Made from the code by `python tools/fields.py docs/fields.md`; edit the sentences there. [gateway.md](gateway.md) says what all routes have
in common. A field that is in none of these tables is passed over, and the answer's head names it; one that is close to a sampling parameter is
refused. `GET /openapi.json` has the types.
"""
SAMPLING = """
## Sampling, in every dialect

Google's names are in `generationConfig`. The native names are in `sampling_params`, and take `json_schema`, `regex` and `ebnf` for [grammars](gateway.md#grammars). What shapes the
distribution keeps its turn out of the loss, but for truncation on the embedded engine
([truncated sampling](algorithms.md#truncated-sampling)). What an engine must be able to do is refused where one cannot.

| chats, completions, responses | messages | contents | native | values | default | shapes the distribution | asks of the engine | |
|---|---|---|---|---|---|---|---|---|
"""
NOTES: Mapping[str, str] = {
    "temperature": "0 is greedy; from 0.0001 on",
    "top_k": "0 and -1 keep all tokens",
    "repetition_penalty": "1 is none",
    "logit_bias": "token id to -100 to 100; 300 ids at most",
    "seed": "choice k has seed + k; refused where an engine honours none",
    "stop": "16 strings at most; never shown, not even in part",
    "max_tokens": (
        "default: the room in the context, 16 in completions, 128 native; more than the "
        "room is lowered to it (`x-midflight-clamped`), or refused with `gateway.strict`; "
        "`max_tokens`, `max_completion_tokens` and `max_output_tokens` are below"
    ),
}
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
EVERYWHERE = {
    "model": "the name of the served model; another is 404",
    "n": "choices, numbered prompt by prompt; 1024 in all",
}
SENTENCES: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {
        "messages": "[roles and parts](gateway.md#chat-completions)",
        "max_tokens, max_completion_tokens": (
            "one thing under two names; two different values are "
            "refused. Default: all the room there is."
        ),
        "logprobs, top_logprobs": (
            "0 to 20 alternatives; `top_logprobs` without `logprobs` is refused"
        ),
        "tools": (
            "type `function`, 1024 at most, a name of 1 to 64 letters (A-Z, a-z, "
            "0-9, `_`, `-`) that no other has, parameters that are a schema of an object. Calls "
            "of a request with a `strict` tool, or with one required, are sampled [under the "
            "tools' schemas](tools.md#forced-calls). Type `custom` is a function of one text, "
            "[told as such](tools.md); other types are left out."
        ),
        "tool_choice": (
            "`none`, `auto`, `required` or one function; `auto` where there are tools. "
            "Of `allowed_tools` only those named are in the prompt. With `none` the tools stay in "
            "the prompt, and what looks like a call is content."
        ),
        "prompt_logprobs": (
            "0 to 20 alternatives: how likely each token of the prompt is. Asks of "
            "the engine to score prompts"
        ),
        "parallel_tool_calls": "`false` ends the answer with its first call",
        "chat_template_kwargs": (
            "handed to the model's template. Names that the gateway "
            "fills in (`messages`, `tools`, `add_generation_prompt`, `bos_token` and the like) are "
            "refused."
        ),
        "reasoning_effort": (
            "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`: handed to the model's "
            "template under this name"
        ),
        "verbosity, enable_thinking, thinking, reasoning": (
            "as the template's options "
            "`verbosity`, "
            "`enable_thinking` and `reasoning_effort`: `thinking` is true, false, or an object "
            "with the `type` `enabled` or `disabled`, `reasoning` one with `effort` and "
            "`enabled`. `chat_template_kwargs` goes before them"
        ),
        "continue_final_message, add_generation_prompt": (
            "the first true: the answer goes on with "
            "the text of the last message, an assistant's, and holds what is new; the second "
            "false: the prompt ends with the last message. Neither is ever trained"
        ),
        "stream": "honoured",
        "stream_options": (
            "`include_usage` and `continuous_usage_stats` are honoured; "
            "`include_obfuscation` is ignored, since frames are not padded"
        ),
        "return_token_ids": ("`prompt_token_ids`, `token_ids` and `weight_versions` in the answer"),
        "return_tokens_as_token_ids": ("names in log-probabilities are `token_id:` and the number"),
    },
    "/v1/completions": {
        "prompt": "a text, a list of texts, token ids, or a list of lists of token ids",
        "max_tokens": "16 where nobody says; 0 with `echo` or `prompt_logprobs` only",
        "logprobs": (
            "0 to 20: the four parallel lists. With alternatives, each entry "
            "holds the sampled token too."
        ),
        "echo": "the prompt before the answer, with `logprobs` its tokens too",
        "prompt_logprobs": (
            "0 to 20 alternatives: how likely each token of the prompt "
            "is. Asks of the engine to score prompts, as `echo` with `logprobs` does"
        ),
        "best_of": "refused unless it is `n`",
        "suffix": "refused: write the text to fill in into the prompt",
        "stream, stream_options, return_token_ids, return_tokens_as_token_ids": "as in chats",
    },
    "/generate": {
        "text, input_ids": "exactly one of them, one prompt or a list",
        "sampling_params": "the same for all prompts; a list is refused",
        "rid": (
            "the name by which the request can be aborted; with several answers, "
            "each "
            "appends its number. A list is refused."
        ),
        "return_logprob": "`output_token_logprobs`",
        "top_logprobs_num": (
            "0 to 20: `output_top_logprobs`; without `return_logprob` it is refused"
        ),
        "return_text_in_logprobs": "honoured",
        "skip_special_tokens, no_stop_trim": (
            "in `sampling_params`: the text holds special tokens, or what ended the answer"
        ),
        "spaces_between_special_tokens, stop_regex": (
            "in `sampling_params`: the first changes nothing, the second must be empty"
        ),
        "logprob_start_len": (
            "honoured from 0 on, with `return_logprob`: `input_token_logprobs` "
            "from there; asks of the engine to score prompts. -1 is none"
        ),
        "stream": "honoured; each frame says all so far",
    },
    "/inference/v1/generate": {
        "token_ids": "one prompt",
        "sampling_params": (
            "under the names of chats, with `n`, `max_tokens` (default: "
            "all the room there is), `logprobs`, `prompt_logprobs` and `structured_outputs`. What "
            "is about text is ignored"
        ),
        "request_id": "the name by which the request can be aborted",
        "return_token_ids": "`prompt_token_ids`",
        "output_mode": "`tokens` only",
        "stream, stream_options": "as in chats",
    },
    "/v1/responses": {
        "model, input, instructions": "read",
        "max_output_tokens, temperature, top_p": "read; default: the session's",
        (
            "seed, stop, stop_token_ids, top_k, min_p, min_tokens, ignore_eos, frequency_penalty, "
            "presence_penalty, repetition_penalty, logit_bias"
        ): ("[as in chats](gateway.md#sampling-in-every-dialect)"),
        "structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar": (
            "as in chats; one of them, or `text.format`"
        ),
        "return_token_ids": (
            "the finished response has `prompt_token_ids`, `token_ids` and `weight_versions`"
        ),
        "return_tokens_as_token_ids": "as in chats",
        "tools": (
            "types `function` and `custom`, whose calls come back as `custom_tool_call`; "
            "`strict` as in chats. Other types are left out."
        ),
        "tool_choice": (
            '`none`, `auto`, `required`, `{"type": "function", "name": ...}`, the same '
            "of a `custom` tool, `allowed_tools`; others are refused"
        ),
        "parallel_tool_calls": "false ends the answer with its first call",
        "text.format": (
            "`text`, `json_object`, `json_schema`: what the answer must match; [with "
            "tools](gateway.md#chat-completions) it may be calls instead."
        ),
        "text.verbosity": "given to the chat template as `verbosity`",
        "reasoning.effort": ("given to the chat template as `reasoning_effort`"),
        "reasoning.summary": (
            "the reasoning is told in full, as the item's `content`; `summary` stays empty"
        ),
        "chat_template_kwargs, enable_thinking": (
            "names for the template, such as `enable_thinking`, which may also stand alone"
        ),
        "include": (
            "`message.output_text.logprobs`, and `reasoning.encrypted_content`, which "
            "changes nothing; others are passed over"
        ),
        "top_logprobs": "0 to 20 alternatives; asks for log-probabilities too",
        "stream, stream_options": "read; frames are not padded",
        "truncation": "`auto` is passed over: an input that does not fit is refused",
        "previous_response_id, conversation": (
            "what the request goes on from: a response or a "
            "conversation [that the session keeps](responses.md); another is 404"
        ),
        "store": "`false`: the response is not kept",
        "prompt, background": (
            "refused: there are no stored prompts, and a response is kept when "
            "it is whole; `background: false` is none"
        ),
        "metadata, user, safety_identifier, prompt_cache_key": "given back, and otherwise ignored",
        "prompt_cache_options, max_tool_calls": "no effect",
        "n, response_format": "refused, with what to send instead; `n` may be 1",
    },
    "/v1/messages": {
        "model": "must be the name of the served model",
        "max_tokens": (
            "required, 1 or more; bounds thinking and text together; more than the room "
            "is lowered to it"
        ),
        "messages": (
            "roles `user`, `assistant`, `system`; see [blocks](messages.md#messages). "
            "Where the last is the assistant's, the answer goes on with its text and holds what "
            "is new; that text is never trained"
        ),
        "system": "a text or blocks of text; the first message of the chat",
        "temperature": (
            "0, or 0.0001 to 1000; newer SDKs send this and the next two by `extra_body`"
        ),
        "top_p": "above 0, up to 1",
        "top_k": "0 and -1 keep all tokens",
        "stop_sequences": (
            "up to 16, none empty; the answer ends before the first that is completed"
        ),
        "stream": "[events](messages.md#answers) instead of one message",
        "tools": (
            "`name`, `description`, `input_schema`; `strict` as in chats. Tools of "
            "Anthropic's own types are left out"
        ),
        "tool_choice": (
            "`auto`, `any`, `tool` with a `name`, `none`; `disable_parallel_tool_use` "
            "ends the answer with its first call. `any` and `tool` sample the call under a grammar"
        ),
        "thinking": (
            "`enabled` and `disabled` are the template's option `enable_thinking`, "
            "`adaptive` leaves it to the template. `budget_tokens` and `display` have no effect"
        ),
        "output_config": (
            "`format` with a JSON schema: the answer is sampled under it, or [calls "
            "a "
            "tool instead](gateway.md#chat-completions). `effort` is the template's option "
            "`reasoning_effort`"
        ),
        "output_format": "the older name of `output_config.format`; both at once are refused",
        "seed, min_p, min_tokens": "ours, by the SDK's `extra_body`; as in chat completions",
        "thread": (
            "refused with the code by which the SDK's tool runner knows to send whole "
            "conversations, and goes on"
        ),
        "return_token_ids": (
            "ours: the message also holds `prompt_token_ids`, `token_ids` and "
            "`weight_versions`; in a stream the first comes with `message_start`, the others with "
            "`message_delta`"
        ),
    },
    "/v1beta/models/{model}:generateContent": {
        "contents": (
            "roles `user`, `model`, `function`; see [parts](contents.md#contents). Where the last is "
            "the model's, the answer goes on with its text and holds what is new; that text is never "
            "trained"
        ),
        "systemInstruction": "a content of text parts; the first message of the chat",
        "tools": (
            "`functionDeclarations`: `name`, `description`, and `parameters` as Google writes schemas, "
            "or `parametersJsonSchema`. What Google's servers would run is left out"
        ),
        "toolConfig": (
            "`functionCallingConfig`: `mode` is `AUTO`, `ANY`, which samples the call under a grammar, "
            "or `NONE`; `VALIDATED` is sampled as `AUTO`. Of `allowedFunctionNames` only those are in "
            "the prompt"
        ),
        "generationConfig": "the fields below, and [sampling](#sampling-in-every-dialect)",
        "generationConfig.candidateCount": "choices, numbered from 0; 1024 at most",
        "generationConfig.responseMimeType": (
            "`text/plain`; `application/json`, under the schema if there is one; `text/x.enum`: one of "
            "the schema's `enum`"
        ),
        "generationConfig.responseSchema, generationConfig.responseJsonSchema": (
            "what the answer must match, as Google writes schemas or as JSON schema; one of them. "
            "[With tools](gateway.md#chat-completions) it may be calls instead"
        ),
        "generationConfig.responseLogprobs, generationConfig.logprobs": (
            "honoured, 0 to 20 alternatives; `logprobs` without `responseLogprobs` is refused"
        ),
        "generationConfig.thinkingConfig": (
            "`includeThoughts`: thoughts are told. `thinkingBudget` 0 and above 0 is the template's "
            "option `enable_thinking`, -1 leaves it to the template; `thinkingLevel` is its option "
            "`reasoning_effort`"
        ),
        "model": "no effect: the address names the model",
        "returnTokenIds": (
            "ours, by the SDK's `extra_body`: the answer also holds `prompt_token_ids`, and each "
            "candidate `token_ids` and `weight_versions`; in a stream at the end"
        ),
    },
    "/v1beta/models/{model}:countTokens": {
        "contents, systemInstruction, tools, toolConfig": "as above",
        "generateContentRequest": "a whole request, in the place of `contents`",
        "generationConfig, model, returnTokenIds": "no effect but that of the template's options",
    },
}


def page() -> str:
    """The page, as Markdown."""
    parts = [INTRODUCTION, SAMPLING, *(_parameter(p) for p in PARAMETERS.values() if p.names)]
    for path, described in DESCRIBED.items():
        if path in SENTENCES:
            parts += [f"\n## `POST {path}`\n\n", *_table(path, described.body)]
    return "".join([*parts, *_not_read(), *_errors()])


def _parameter(parameter: Parameter) -> str:
    names = [
        f"`{name}`" if (name := parameter.names.get(api)) else ""
        for api in (Api.OPENAI, Api.ANTHROPIC, Api.GOOGLE, Api.NATIVE)
    ]
    shapes = "truncates" if parameter.truncates else "yes" if parameter.reshapes else ""
    default = (
        ""
        if parameter.default in (None, ()) or parameter.name in ("max_tokens", "seed")
        else f"`{json.dumps(parameter.default)}`"
    )
    values = (
        ""
        if parameter.range is None
        else str(parameter.range)
        .replace("2147483647", "2^31 - 1")
        .replace("18446744073709551615", "2^64 - 1")
    )
    return _row(
        *names,
        values,
        default,
        shapes,
        "" if parameter.feature is None else parameter.feature.value,
        NOTES.get(parameter.name, ""),
    )


def _table(path: str, body: type[BaseModel]) -> Iterator[str]:
    yield "| field | what becomes of it |\n|---|---|\n"
    sentences = SENTENCES[path]
    for key, sentence in sentences.items():
        names = ", ".join(f"`{each}`" for each in key.split(", ")) if _is_list(key) else key
        yield _row(names, sentence)
    spoken_of = (
        {name for key in sentences for name in re.findall(r"[A-Za-z_]+", key)}
        | GRAMMARS
        | set(EVERYWHERE)
        | _names_of_parameters()
    )
    if missing := {field.alias or name for name, field in body.model_fields.items()} - spoken_of:
        raise SystemExit(f"tools/fields.py says nothing of {sorted(missing)} of {path}")


def _names_of_parameters() -> set[str]:
    return {name for parameter in PARAMETERS.values() for name in parameter.names.values()} | set(
        NativeSampling.model_fields
    )


def _is_list(key: str) -> bool:
    return re.fullmatch(r"[A-Za-z_.]+(, [A-Za-z_.]+)*", key) is not None


def _passed_over() -> Iterator[tuple[str, str, str]]:
    """Each field that is passed over, why, and what becomes of it with `gateway.strict`."""
    ignored = {
        **unread_fields.IGNORED,
        **unread_fields.HARMLESS,
        **unread_fields.HARMLESS_MESSAGES,
        **unread_fields.HARMLESS_GOOGLE,
    }
    for name, reason in sorted(ignored.items()):
        if name in unread_fields.HARMLESS:
            yield name, reason, "passed over"
        elif name in unread_fields.HARMLESS_MESSAGES:
            yield name, reason, "passed over in messages"
        elif name in unread_fields.HARMLESS_GOOGLE:
            yield name, reason, "passed over in contents"
        else:
            yield name, reason, "refused"
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
        for name, reason in {**body.ignored, **body.harmless}.items():
            strict = "passed over" if name in body.harmless else "refused"
            yield f"{place}.{name}", reason, strict


def _not_read() -> Iterator[str]:
    yield (
        "\n## Passed over\n\nThey cannot change the text. The head of the answer names them "
        "(`x-midflight-ignored`), and `midflight_ignored_fields` counts them.\n"
    )
    general: list[str] = []
    alike: dict[str, dict[str, None]] = {}
    harmless: dict[str, dict[str, None]] = {}
    for name, reason, strict in _passed_over():
        if "." in name:
            alike.setdefault(reason, {})[f"`{name}`"] = None
        else:
            general.append(f"`{name}`")
        harmless.setdefault(strict, {})[f"`{name}`"] = None
    yield (
        "With `gateway.strict` they are refused, but for "
        f"{', '.join(harmless['passed over'])}, and in messages "
        f"{', '.join(harmless['passed over in messages'])}.\n\n"
    )
    yield f"Of requests: {', '.join(general)}.\n\n"
    yield "| fields inside others | why |\n|---|---|\n"
    for reason, names in alike.items():
        yield _row(", ".join(names), reason)
    yield (
        "\nTools of these types are left out of the prompt, with or without a date behind: "
        f"{', '.join(f'`{name}`' for name in unread_fields.TOOLS)}; so are those of types that are\nnot "
        "known here.\n"
    )
    yield (
        "\n## Refused\n\nThey would change the text, or promise what no answer here has. `null` "
        "and the value that asks for nothing are accepted.\n\n"
    )
    yield "| fields | value that asks for nothing | instead |\n|---|---|---|\n"
    refused: dict[tuple[str, str], list[str]] = {}
    for name in sorted({*unread_fields.NEUTRAL, *unread_fields.REFUSED}):
        neutral = " or ".join(
            f"`{json.dumps(value)}`" for value in unread_fields.NEUTRAL.get(name, ())
        )
        instead = unread_fields.REFUSED.get(name, "")
        refused.setdefault((neutral, instead), []).append(f"`{name}`")
    for (neutral, instead), names in refused.items():
        yield _row(", ".join(names), neutral, instead)


def _errors() -> Iterator[str]:
    """By status, and by whether trying again can help."""
    yield "\n## Errors\n\nWhere trying again can help there is `Retry-After`.\n\n"
    yield "| status | `code` | worth trying again |\n|---|---|---|\n"
    found: dict[tuple[int, bool], set[str]] = {}
    for error in _answered(MidflightError):
        found.setdefault((error.status, error.retryable), set()).add(f"`{error.code}`")
    for (status, retryable), codes in sorted(found.items()):
        yield _row(str(status), ", ".join(sorted(codes)), "yes" if retryable else "")


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
