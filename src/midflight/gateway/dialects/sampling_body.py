"""The request body that OpenAI's dialects share."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

from pydantic import Field, JsonValue

from midflight.gateway.dialects.constraints import grammar_of
from midflight.gateway.dialects.fields import Body, RequestBody
from midflight.gateway.dialects.sampling_fields import SamplingFields
from midflight.gateway.sessions.request import Asked
from midflight.types import Grammar
from midflight.types.generation import Api


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: frames are not padded."""


class ModelBody(RequestBody):
    model: str


OPENAI = SamplingFields(Api.OPENAI)


class SamplingBody(OPENAI.on(ModelBody)):
    """The fields that OpenAI's dialects share. `OPENAI` adds the sampling parameters."""

    n: Annotated[int, Field(ge=1)] | None = None
    response_format: dict[str, JsonValue] | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    guided_json: dict[str, JsonValue] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @cached_property
    def grammar(self) -> tuple[str, Grammar] | None:
        """The grammar that the answer must match, with the name of the field that gives it. Raises
        `RequestRejected` if several fields give one.
        """
        return grammar_of(self)

    def names(
        self, max_tokens: str = "max_tokens", *, top_logprobs: str = "top_logprobs"
    ) -> Mapping[str, str]:
        """The client's names for the parameters of `asked`, if they differ."""
        grammar = "grammar" if self.grammar is None else self.grammar[0]
        return {"max_tokens": max_tokens, "top_logprobs": top_logprobs, "grammar": grammar}

    def asked(self, max_tokens: int | None, *, top_logprobs: int | None = None) -> Asked:
        grammar = None if self.grammar is None else self.grammar[1]
        return OPENAI.asked(self, max_tokens=max_tokens, top_logprobs=top_logprobs, grammar=grammar)
