"""The native dialect: `POST /generate` with the JSON that SGLang's clients write and read."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.answers.answer import START, Answer, Event, News
from midflight.gateway.dialects.completions import PROMPT_SCHEMA, sources
from midflight.gateway.dialects.constraints import grammar_of
from midflight.gateway.dialects.exchange import (
    Alternatives,
    Reply,
    alternatives,
    token_text,
    weight_versions,
)
from midflight.gateway.dialects.fields import RequestBody, TopLogprobs, parse
from midflight.gateway.dialects.sampling_fields import SamplingFields
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import Asked, CompletionCall
from midflight.text import Tokenizer
from midflight.types import Finish, FinishReason, Json, Likely
from midflight.types.generation import Api

DEFAULT_MAX_TOKENS = 128
"""SGLang's default."""

_PREFIX = "sampling_params."
_NATIVE = SamplingFields(Api.NATIVE, prefix=_PREFIX)


class NativeSampling(_NATIVE.on(RequestBody)):
    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """0 generates nothing. The prompt is counted, and scored if that is asked for."""
    stop_regex: Annotated[list[str], Field(max_length=0)] | None = None
    """Only an empty list is accepted, because a stop must be a text."""
    n: Annotated[int, Field(ge=1)] | None = None
    json_schema: dict[str, JsonValue] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Changes nothing, because only slow tokenizers ever wrote such spaces."""

    def call_parts(self, *, top_logprobs: int | None) -> tuple[Asked, Mapping[str, str]]:
        """The sampling parameters, and the client's names for them."""
        param, grammar = grammar_of(self, prefix=_PREFIX) or ("grammar", None)
        asked = _NATIVE.asked(self, top_logprobs=top_logprobs, grammar=grammar)
        return asked, {**_NAMES, "grammar": param}


_NAMES: Mapping[str, str] = {
    **_NATIVE.names,
    "top_logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
}


def _single(value: object) -> object:
    """Refuses a list. SGLang takes one value for each prompt, the gateway one for all."""
    if isinstance(value, list):
        raise ValueError(
            "one value holds for all prompts of a request; send it alone, and prompts that differ "
            "in it as requests of their own"
        )
    return value


class NativeText:
    """Writes output tokens as text, as the sampling parameters demand. By default the text is the
    same as for every other client of the gateway: without special tokens and without the stop
    string that ended the answer.
    """

    def __init__(self, sampling: NativeSampling) -> None:
        self._skips_special = sampling.skip_special_tokens is not False
        self._trims = not sampling.no_stop_trim
        self._is_default = self._skips_special and self._trims

    def text(self, tokenizer: Tokenizer, answer: Answer) -> str:
        """The text of a closed answer."""
        if self._is_default:
            return answer.text
        return self._ended(tokenizer, answer.turn.output_ids, answer.turn.finish)

    def so_far(self, tokenizer: Tokenizer, answer: Answer, told: News) -> str:
        """The text of an answer that goes on. An end that may begin a stop string or an incomplete
        character is held back.
        """
        if self._is_default:
            return told.text
        if answer.finish is not None:
            return self._ended(tokenizer, told.token_ids, answer.finish)
        text = tokenizer.decode(told.token_ids, skip_special=self._skips_special)
        text = text.rstrip(_REPLACEMENT)
        stops = answer.request.sampling.stop if self._trims else ()
        held = 0
        for stop in stops:
            for length in range(1, len(stop)):
                if text.endswith(stop[:length]):
                    held = max(held, length)
        return text[: len(text) - held]

    def _ended(self, tokenizer: Tokenizer, ids: Sequence[int], finish: Finish) -> str:
        if self._trims and isinstance(finish.matched, int):
            ids = ids[:-1]
        text = tokenizer.decode(ids, skip_special=self._skips_special)
        if self._trims and isinstance(finish.matched, str):
            return text.rpartition(finish.matched)[0]
        return text


_REPLACEMENT = "\ufffd"

_Prompt = Annotated[
    JsonValue, WithJsonSchema({"anyOf": [*PROMPT_SCHEMA["anyOf"], {"type": "null"}]})
]


class NativeBody(RequestBody):
    text: _Prompt = None
    input_ids: _Prompt = None
    sampling_params: Annotated[NativeSampling | None, BeforeValidator(_single)] = None
    rid: Annotated[
        Annotated[str, Field(min_length=1, max_length=256)] | None, BeforeValidator(_single)
    ] = None
    return_logprob: Annotated[bool | None, BeforeValidator(_single)] = None
    logprob_start_len: Annotated[Annotated[int, Field(ge=-1)] | None, BeforeValidator(_single)] = (
        None
    )
    top_logprobs_num: Annotated[TopLogprobs | None, BeforeValidator(_single)] = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None


class NativeExchange:
    """One request. A single answer is an object, several answers are a list. Each frame of a stream
    holds the whole answer so far.
    """

    def __init__(self, body: bytes) -> None:
        self.unread = UnreadFields()
        parsed = parse(NativeBody, body, unread=self.unread)
        sampling = parsed.sampling_params or NativeSampling()
        _check(parsed)
        param = "text" if parsed.input_ids is None else "input_ids"
        prompt = parsed.text if parsed.input_ids is None else parsed.input_ids
        self._logprobs = bool(parsed.return_logprob)
        self._texts = bool(parsed.return_text_in_logprobs)
        self._top_logprobs = bool(parsed.top_logprobs_num)
        start = parsed.logprob_start_len
        self._wording = NativeText(sampling)
        self._scored_from = start if self._logprobs and start is not None and start >= 0 else None
        self._listed = (sampling.n or 1) > 1 or _is_batch(prompt)
        asked, names = sampling.call_parts(top_logprobs=parsed.top_logprobs_num)
        self.call = CompletionCall(
            sources=sources(prompt, param=param),
            asked=asked,
            n=sampling.n or 1,
            prompt_logprobs=None if self._scored_from is None else (parsed.top_logprobs_num or 0),
            stream=bool(parsed.stream),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            request_id=parsed.rid,
            may_abort=True,
            prompt_param=param,
            names=names,
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        bodies: list[Json] = [self._answer(reply.tokenizer, answer) for answer in answers]
        return bodies if self._listed else bodies[0]

    def opening(self, reply: Reply) -> Iterable[Json]:
        return ()

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if isinstance(event, News):
            yield self._partial(reply.tokenizer, reply.job.answers[event.index])
        else:
            yield self._answer(reply.tokenizer, event)

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        return ()

    def _partial(self, tokenizer: Tokenizer, answer: Answer) -> Json:
        """The whole answer so far."""
        told = answer.since(START)
        meta = _meta(answer.request_id, len(answer.prompt.ids), len(told.token_ids))
        meta |= self._of_tokens(tokenizer, told.token_ids, told.logprobs, told.top_logprobs)
        meta |= self._of_prompt(tokenizer, answer) | {"finish_reason": None}
        text = self._wording.so_far(tokenizer, answer, told)
        return {
            "index": answer.index,
            "text": text,
            "output_ids": list(told.token_ids),
            "meta_info": meta,
        }

    def _answer(self, tokenizer: Tokenizer, answer: Answer) -> Json:
        turn = answer.turn
        meta = _meta(answer.request_id, len(turn.prompt_ids), len(turn.output_ids))
        meta |= self._of_tokens(tokenizer, turn.output_ids, turn.logprobs, answer.top_logprobs)
        meta |= self._of_prompt(tokenizer, answer)
        meta |= {
            "finish_reason": _finish_reason(answer),
            "weight_versions": weight_versions(turn),
            "weight_version": str(turn.segments[-1].version) if turn.segments else None,
            "num_retractions": turn.num_resumes,
        }
        text = self._wording.text(tokenizer, answer)
        return {
            "index": answer.index,
            "text": text,
            "output_ids": list(turn.output_ids),
            "meta_info": meta,
        }

    def _triple(self, tokenizer: Tokenizer, token_id: int, logprob: float | None) -> Json:
        """Log-probability, id and, if wanted, text."""
        return [logprob, token_id, token_text(tokenizer, token_id) if self._texts else None]

    def _triples(self, tokenizer: Tokenizer, likely: Likely) -> list[Json]:
        return [self._triple(tokenizer, *pair) for pair in likely]

    def _of_tokens(
        self, tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float], top: Alternatives
    ) -> dict[str, Json]:
        told: dict[str, Json] = {}
        if self._logprobs:
            told["output_token_logprobs"] = [
                self._triple(tokenizer, *pair) for pair in zip(ids, logprobs, strict=True)
            ]
        if self._top_logprobs:
            rows = alternatives(top, len(ids))
            told["output_top_logprobs"] = [self._triples(tokenizer, others) for others in rows]
        return told

    def _of_prompt(self, tokenizer: Tokenizer, answer: Answer) -> dict[str, Json]:
        """The scores of the prompt's tokens from `logprob_start_len` on. Nothing predicts the first
        token.
        """
        if self._scored_from is None:
            return {}
        own = [self._triple(tokenizer, answer.prompt.ids[0], None)]
        own += [self._triple(tokenizer, *likely[0]) for likely in answer.prompt_logprobs]
        told: dict[str, Json] = {"input_token_logprobs": own[self._scored_from :]}
        if self._top_logprobs:
            top: list[Json] = [None]
            for likely in answer.prompt_logprobs:
                top.append(self._triples(tokenizer, likely[1:]))
            told["input_top_logprobs"] = top[self._scored_from :]
        return told


def _meta(request_id: str, num_prompt: int, num_output: int) -> dict[str, Json]:
    return {
        "id": request_id,
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "cached_tokens": 0,
    }


def _check(body: NativeBody) -> None:
    """Refuses fields that contradict each other."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestRejected("text and input_ids: send exactly one of them.", param="input_ids")
    if body.top_logprobs_num and not body.return_logprob:
        raise RequestRejected(
            (
                f"top_logprobs_num is {body.top_logprobs_num} without return_logprob: send "
                "return_logprob true with it."
            ),
            param="top_logprobs_num",
        )


def _is_batch(prompt: JsonValue) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def _finish_reason(answer: Answer) -> Json:
    finish = answer.turn.finish
    match finish.reason:
        case FinishReason.STOP:
            return {"type": "stop", "matched": finish.matched}
        case FinishReason.LENGTH:
            return {"type": "length", "length": len(answer.turn.output_ids)}
        case FinishReason.ABORT:
            return {"type": "abort", "message": "aborted on request"}
