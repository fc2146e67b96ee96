"""The policy for fields that the bodies do not read: each is ignored, or refused by name.

A field is ignored if it cannot change the text that was asked for, and a header of the answer names
it. It is refused if the answer would be wrong without it: a sampling parameter that no engine here
has, a misspelt one, a picture for a model that reads text. `gateway.strict` refuses all but the
harmless ones.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from pydantic import JsonValue

from midflight.errors import RequestRejected
from midflight.types.generation import PARAMETERS, Api

_LABELS = "the client's own labels"
_CACHE = "engines find common prefixes by themselves"
_SERVER = "chooses a server of the vendor's"
_USER = "names the client's own user"
_HIDDEN = "names what no local model has"
_TALLY = "tokens are always counted"

HARMLESS: Mapping[str, str] = {
    "user": _USER,
    "safety_identifier": _USER,
    "metadata": _LABELS,
    "store": "a session keeps what was said in it; without one nothing is kept",
    "prompt_cache_key": _CACHE,
    "prompt_cache_retention": _CACHE,
    "service_tier": "there is one tier",
    "parallel_tool_calls": "says nothing where no tools are given",
    "prediction": "a hint for speed",
}
"""Fields that are ignored on every route, even if `gateway.strict` is set."""

HARMLESS_MESSAGES: Mapping[str, str] = {
    "metadata": _LABELS,
    "cache_control": _CACHE,
    "diagnostics": "asks about the cache of prompts",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "inference_geo": "names a place of the vendor's",
    "user_profile_id": _USER,
    "workspace_id": "names the client's account",
}

HARMLESS_GOOGLE: Mapping[str, str] = {
    "labels": _LABELS,
    "safetySettings": "nothing is moderated here",
    "serviceTier": "there is one tier",
    "store": "a session keeps what was said in it; without one nothing is kept",
}

IGNORED: Mapping[str, str] = {
    "access_programs": "names the client's account",
    "async": "the client sends a result when it has it",
    "background_options": "a response is not made in the background",
    "betas": "names features of the vendor's",
    "billing_policy": "names the client's account",
    "cache_control": _CACHE,
    "cache_salt": "engines share no prefix that was sampled under other weights",
    "caller": "the model calls tools itself",
    "citations": "answers name no sources",
    "client_metadata": _LABELS,
    "compaction": "the conversation is read whole, as it was sent",
    "container": "names a machine of the vendor's",
    "context_management": "the conversation is read whole, as it was sent",
    "data_parallel_rank": _SERVER,
    "extra_headers": "belongs into the head of the request",
    "extra_query": "belongs into the head of the request",
    "fallback_credit_token": "names the client's account",
    "fallbacks": "there is one model",
    "include_reasoning": "reasoning is always told apart",
    "kv_transfer_params": _SERVER,
    "max_tool_calls": "counts calls of tools that servers run",
    "mm_processor_kwargs": "is about pictures and sound",
    "models": "there is one model",
    "partMetadata": _LABELS,
    "partialArgs": "a call is read when it is whole",
    "scheduling": "the client sends a result when it has it",
    "willContinue": "a call is read when it is whole",
    "moderation": "nothing is moderated here",
    "num_retries": "belongs to the client",
    "phase": "templates have no place for it",
    "plugins": _HIDDEN,
    "priority": "requests are served in the order of arrival",
    "prompt_cache_options": _CACHE,
    "provider": _SERVER,
    "request_id": "names the request for the client",
    "route": _SERVER,
    "separate_reasoning": "reasoning is always told apart",
    "service": _SERVER,
    "session_id": "names the client's own session",
    "stream_reasoning": "reasoning is streamed where the answer is",
    "timeout": "belongs to the client",
    "toolset_name": _HIDDEN,
    "trace": _LABELS,
    "transforms": "the conversation is read whole, as it was sent",
    "usage": _TALLY,
    "web_search_options": "no server searches here: give the model a tool of your own",
}
"""Fields that are ignored on every route, with the reason. A name that is in no table is ignored
too, unless it is close to a sampling parameter.
"""

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "prompt_logprobs": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "image_data": ([], ""),
    "audio_data": ([], ""),
    "video_data": ([], ""),
    "documents": ([],),
    "return_hidden_states": (False,),
    "do_sample": (True,),
    "mcp_servers": ([],),
}
"""The values that ask for nothing. Any other value of a refused field is refused."""

_ONE = "it would change the text, and no engine here has it: leave it out"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "typical",
            "typical_p",
            "top_a",
            "tfs",
            "tfs_z",
            "mirostat",
            "mirostat_mode",
            "mirostat_eta",
            "mirostat_tau",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "xtc_probability",
            "xtc_threshold",
            "epsilon_cutoff",
            "eta_cutoff",
            "dynatemp_range",
            "dynatemp_exponent",
            "smoothing_factor",
            "smoothing_curve",
            "top_n_sigma",
            "nsigma",
            "length_penalty",
            "no_repeat_ngram_size",
            "diversity_penalty",
            "num_beams",
            "num_beam_groups",
            "beam_width",
            "use_beam_search",
            "early_stopping",
            "repeat_last_n",
            "penalty_alpha",
            "encoder_repetition_penalty",
            "guidance_scale",
            "cfg_scale",
            "negative_prompt",
            "custom_logit_processor",
            "custom_params",
            "logits_processors",
            "thinking_budget",
            "thinking_token_budget",
            "bad_words",
            "allowed_token_ids",
            "suppress_tokens",
            "stop_regex",
            "sequence_bias",
            "temperature_last",
            "repetition_detection",
            "vllm_xargs",
            "min_keep",
        ),
        _ONE,
    ),
    "random_seed": "send `seed` instead",
    "do_sample": "send temperature 0 for the likeliest token always",
    "repeat_penalty": "send `repetition_penalty` instead",
    "num_predict": "send `max_tokens` instead",
    "n_predict": "send `max_tokens` instead",
    "max_new_tokens": "send `max_tokens` instead",
    "max_length": "send `max_tokens` instead",
    "max_output_tokens": "send `max_tokens` instead",
    "max_gen_len": "send `max_tokens` instead",
    "min_new_tokens": "send `min_tokens` instead",
    "min_length": "send `min_tokens` instead",
    "sampling_seed": "send `seed` instead",
    "stop_words": "send `stop` instead",
    "stop_token": "send `stop` instead",
    "stop_sequences": "send `stop` instead",
    "json_schema": "send `response_format` instead",
    "regex": "send `guided_regex` instead",
    "ebnf": "send `guided_grammar` instead",
    "grammar": "send `guided_grammar` instead",
    "guided_whitespace_pattern": _ONE,
    "num_ctx": "the context is the model's",
    "truncate_prompt_tokens": "shorten the prompt yourself",
    "truncate": "shorten the prompt yourself",
    "chat_template": "the template is the model's; its options go into `chat_template_kwargs`",
    "documents": "write them into the messages",
    "prompt_embeds": "send text or token ids",
    "input_embeds": "send text or token ids",
    "add_special_tokens": "write special tokens into the prompt",
    "lora_path": "weights are the run's: leave it out",
    "lora_request": "weights are the run's: leave it out",
    "functions": "send `tools` instead",
    "function_call": "send `tool_choice` instead",
    "echo": "send it to `/v1/completions`",
    "prompt_logprobs": "send it to `/v1/completions`",
    "suffix": "write the text to fill in into the prompt, as the model's format for it demands",
    "audio": "answers are text",
    "modalities": "answers are text",
    "image_data": "the model reads text",
    "audio_data": "the model reads text",
    "video_data": "the model reads text",
    "return_hidden_states": "engines here tell no hidden states",
    "mcp_servers": "connect to them yourself, and send their tools",
    "best_of": "send `n`, and choose among the answers",
    "tools": "send them to a chat",
    "tool_choice": "send it to a chat",
    "skip_special_tokens": "special tokens are not told as text: read `token_ids`",
    "spaces_between_special_tokens": "special tokens are not told as text: read `token_ids`",
    "include_stop_str_in_output": "`stop_reason` says which stop string came",
    "no_stop_trim": "the answer says which stop string came",
    "add_generation_prompt": "send it to a chat",
    "continue_final_message": "send it to a chat",
    "image": "the model reads text",
    "n": "send several requests",
}
"""Fields that are refused on every route that does not read them, each with what to do instead.
They would change the text, or promise something that the answer lacks.
"""

REFUSED_MESSAGES: Mapping[str, str] = {
    **{name: remedy.replace("`stop`", "`stop_sequences`") for name, remedy in REFUSED.items()},
    "stop": "send `stop_sequences` instead",
    "max_completion_tokens": "send `max_tokens` instead",
    "response_format": "send `output_config` instead",
    "stop_sequence": "send `stop_sequences` instead",
    "instructions": "send `system` instead",
    "reasoning_effort": "send `output_config` with an `effort`",
}
"""Fields that are refused on Anthropic's routes."""

REFUSED_RESPONSES: Mapping[str, str] = {
    **{
        name: remedy.replace("`max_tokens`", "`max_output_tokens`")
        for name, remedy in REFUSED.items()
    },
    "max_tokens": "send `max_output_tokens` instead",
    "max_completion_tokens": "send `max_output_tokens` instead",
    "reasoning_effort": "send `reasoning` with an `effort`",
    "messages": "send `input` instead",
}
"""Fields that are refused on the responses route."""

REFUSED_GOOGLE: Mapping[str, str] = {
    **REFUSED,
    "cachedContent": "send the whole conversation as `contents`",
    "messages": "send `contents` instead",
    "system": "send `systemInstruction` instead",
    "instructions": "send `systemInstruction` instead",
    "prompt": "send `contents` instead",
    "input": "send `contents` instead",
    "stream": "send the request to `:streamGenerateContent`",
    **dict.fromkeys(
        (
            "candidateCount",
            "frequencyPenalty",
            "maxOutputTokens",
            "presencePenalty",
            "responseMimeType",
            "responseSchema",
            "seed",
            "stopSequences",
            "temperature",
            "thinkingConfig",
            "topK",
            "topP",
        ),
        "send it in `generationConfig`",
    ),
}
"""Fields that are refused on Google's routes."""

REFUSED_GENERATION: Mapping[str, str] = {
    **REFUSED,
    "maxTokens": "send `maxOutputTokens` instead",
    "responseFormat": "send `responseSchema` instead",
    "responseModalities": "answers are text",
    "speechConfig": "answers are text",
    "imageConfig": "answers are text",
    "translationConfig": "answers are text",
}
"""Fields that are refused in the `generationConfig` of Google's routes."""

TOOLS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "apply_patch",
            "code_execution",
            "code_interpreter",
            "computer",
            "computer_use_preview",
            "file_search",
            "image_generation",
            "local_shell",
            "mcp",
            "mcp_toolset",
            "programmatic_tool_calling",
            "shell",
            "tool_search",
            "web_fetch",
            "web_search",
            "web_search_preview",
            "bash",
            "text_editor",
            "memory",
            "browser",
            "browser_toolset",
            "computer_toolset",
            "tool_search_tool_bm25",
            "tool_search_tool_regex",
            "str_replace_editor",
            "advisor",
        ),
        "no local model can call it",
    )
}
"""Types of tools that are left out of the prompt, without the dates that some end in. Types that
are in no table are left out too.
"""

MAX_UNREAD = 256
"""The most fields in one request that are not read. SDKs and agents send some dozens."""
MAX_NAME = 80
"""The most letters of a name that are shown."""
_MAX_HEADER = 2048
"""The most letters of a header. Proxies refuse headers above some kilobytes."""


@dataclass(slots=True)
class UnreadFields:
    """The fields of one request that are not read, each once and without the numbers of its
    place.
    """

    fields: dict[str, bool] = field(default_factory=dict[str, bool])
    """The names. The value says whether a name is in a table; only then it may be a label of a
    metric.
    """
    refusal: RequestRejected | None = None
    """The error of a strict gateway."""

    def note(self, param: str, fault: str | None = None, *, known: bool = True) -> None:
        """Notes a field that is ignored. `fault` is the reason for which a strict gateway refuses
        it; `None` if it does not.
        """
        if fault is not None and self.refusal is None:
            self.refusal = RequestRejected(
                f"{fault}, or set gateway.strict = false.", param=param[:MAX_NAME]
            )
        name = ".".join(part for part in param.split(".") if not part.isdigit())[:MAX_NAME]
        self.fields[name] = known or self.fields.get(name, False)
        if len(self.fields) > MAX_UNREAD:
            raise RequestRejected(
                (
                    f"the request holds more than {MAX_UNREAD} fields that are not read here: "
                    "leave them out."
                ),
                param=param[:MAX_NAME],
            )

    def add(self, other: "UnreadFields") -> None:
        """Notes what another part of the same request holds."""
        for name, known in other.fields.items():
            self.note(name, known=known)
        self.refusal = self.refusal or other.refusal

    def copy(self) -> "UnreadFields":
        return UnreadFields(dict(self.fields), self.refusal)

    def also(self, param: str) -> "UnreadFields":
        """Notes a field that is found after all others were counted. Returns an `UnreadFields` with only
        that field.
        """
        self.note(param)
        return UnreadFields({param: True})

    def unknown(self, param: str) -> None:
        self.note(param, f"unknown field {param[:MAX_NAME]!r}: leave it out", known=False)

    def rest(self, given: Mapping[str, JsonValue], read: frozenset[str], param: str) -> None:
        """Notes the fields of an object that are not in `read`."""
        for name, value in given.items():
            if name in read or value is None:
                continue
            if name in IGNORED:
                self.note(f"{param}.{name}")
            else:
                self.unknown(f"{param}.{name}")

    def refuse(self, error: RequestRejected) -> None:
        """Sets the error of a strict gateway, for a value that other gateways accept."""
        self.refusal = self.refusal or error

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers of an answer that report on the fields of its request."""
        return ((b"x-midflight-ignored", self._names),) if self.fields else ()

    @property
    def _names(self) -> bytes:
        """The names in the form that a header may have."""
        names = ", ".join(self.fields).encode("ascii", "replace").translate(_PRINTABLE)
        return names if len(names) <= _MAX_HEADER else names[: _MAX_HEADER - 3] + b"..."

    @property
    def labels(self) -> tuple[str, ...]:
        """The names as labels of a metric. All names that are in no table share one label, so there
        are few labels.
        """
        found: dict[str, None] = {}
        for name, known in self.fields.items():
            found[name if known else "other"] = None
        return tuple(found)


_PRINTABLE = b"?" * 32 + bytes(range(32, 127)) + b"?" * 129
"""A table for `bytes.translate` that replaces bytes which a header may not hold."""


def is_neutral(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    """True if a value asks for nothing. `True` is not the same as 1 here."""
    for known in neutral:
        if value == known and isinstance(value, bool) == isinstance(known, bool):
            return True
    return False


_SAMPLING = sorted(
    {p.names.get(Api.OPENAI, p.name) for p in PARAMETERS.values()}
    | {p.names.get(Api.NATIVE, p.name) for p in PARAMETERS.values()}
    | {
        "max_completion_tokens",
        "n",
        "logprobs",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "stream",
        "tools",
        "tool_choice",
        "messages",
        "prompt",
        "input",
        "instructions",
        "system",
    }
    | REFUSED.keys()
)


@lru_cache(4096)
def misspelt(name: str) -> str | None:
    """The parameter that shapes the answer and has almost this name, if there is one."""
    plain = name.strip().lower().replace("-", "_")
    if plain in _SAMPLING or len(plain) > 40:
        return plain if plain in _SAMPLING else None
    close = difflib.get_close_matches(plain, _SAMPLING, n=1, cutoff=0.86)
    return close[0] if close and min(len(plain), len(close[0])) > 3 else None
