"""The JSON of `POST /generate`, in SGLang's shape: reading requests, writing answers."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable

import msgspec

from midflight.errors import RequestRejected
from midflight.text.detokenizer import StopMatcher
from midflight.text.tokenizer import Tokenizer
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, Grammar, GrammarKind, SamplingParams


class SamplingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unknown keys are refused: to ignore one would sample another distribution than was asked for."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: int = 1
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = None
    """Token ids as text: JSON knows no other keys."""
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    """In llguidance's Lark dialect."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False


class GenerateBody(msgspec.Struct, frozen=True):
    input_ids: list[int] | None = None
    text: str | None = None
    rid: str | None = None
    sampling_params: SamplingBody = SamplingBody()
    return_logprob: bool = False
    top_logprobs_num: int = 0
    """Answered where `return_logprob` is true."""
    stream: bool = False


def read_request(body: GenerateBody, tokenizer: Tokenizer) -> GenerateRequest:
    """The request meant by a body. Without `sampling_seed` one is drawn."""
    if (body.input_ids is None) == (body.text is None):
        raise RequestRejected("generating: the body needs one of input_ids and text. Send exactly one.", param="input_ids")
    ids = tuple(body.input_ids) if body.input_ids is not None else tokenizer.encode(body.text or "")
    return GenerateRequest(
        request_id=body.rid or uuid.uuid4().hex,
        input_ids=ids,
        num_prompt_tokens=len(ids),
        sampling=_sampling(body.sampling_params, top_logprobs=body.top_logprobs_num),
    )


def _sampling(body: SamplingBody, *, top_logprobs: int) -> SamplingParams:
    if body.n != 1:
        raise RequestRejected(f"sampling: n {body.n} is not supported here. Send 1 or nothing.", param="n")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=body.max_new_tokens,
        min_tokens=body.min_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        seed=random.getrandbits(63) if body.sampling_seed is None else body.sampling_seed,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        grammar=_grammar(body),
        top_logprobs=top_logprobs,
    )


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    bad = next((key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
    if bad is not None:
        raise RequestRejected(f"sampling: logit_bias names {bad!r}. Send token ids as its keys.", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


def _grammar(body: SamplingBody) -> Grammar | None:
    texts = {GrammarKind.JSON_SCHEMA: body.json_schema, GrammarKind.REGEX: body.regex, GrammarKind.LARK: body.ebnf}
    given = [Grammar(kind, text) for kind, text in texts.items() if text is not None]
    if len(given) > 1:
        raise RequestRejected("sampling: an answer has one form. Send one of json_schema, regex and ebnf.", param="json_schema")
    return given[0] if given else None


class FinishBody(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    matched: str | int | None = None
    length: int | None = None


class SpanBody(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled under `version`."""

    version: str
    start: int
    end: int


class MetaBody(msgspec.Struct, frozen=True):
    id: str
    finish_reason: FinishBody | None
    prompt_tokens: int
    completion_tokens: int
    weight_version: str | None
    weight_versions: tuple[SpanBody, ...]
    output_token_logprobs: tuple[tuple[float, int, None], ...] | None = None
    output_top_logprobs: tuple[tuple[tuple[float, int, None], ...], ...] | None = None


class AnswerBody(msgspec.Struct, frozen=True):
    text: str
    output_ids: tuple[int, ...]
    meta_info: MetaBody


class Answer:
    """The answer so far: grows by chunks, and reads cumulatively, as SGLang's does."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._request, self._wants_logprobs = request, logprobs
        self._matcher = StopMatcher(tokenizer, request.sampling.stop, min_tokens=request.sampling.min_tokens)
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[float, int, None], ...]] = []
        self._versions: list[int] = []
        self._finish: Finish | None = None

    def add(self, chunk: Chunk) -> None:
        self._ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top += [tuple((p, i, None) for i, p in likeliest) for likeliest in chunk.top_logprobs]
        self._versions += [chunk.version] * len(chunk.token_ids)
        self._finish = chunk.finish
        self._matcher.feed(chunk.token_ids)
        self._text += self._matcher.take()
        if chunk.finish is not None:
            self._text += self._matcher.finish()

    def body(self) -> AnswerBody:
        spans = tuple(version_spans(self._versions))
        pairs = tuple((p, i, None) for p, i in zip(self._logprobs, self._ids, strict=True))
        meta = MetaBody(
            id=self._request.request_id,
            finish_reason=None if self._finish is None else _finish_body(self._finish, len(self._ids)),
            prompt_tokens=self._request.num_prompt_tokens,
            completion_tokens=len(self._ids),
            weight_version=spans[-1].version if spans else None,
            weight_versions=spans,
            output_token_logprobs=pairs if self._wants_logprobs else None,
            output_top_logprobs=tuple(self._top) if self._wants_logprobs and self._request.sampling.top_logprobs else None,
        )
        return AnswerBody(text=self._text, output_ids=tuple(self._ids), meta_info=meta)


def version_spans(versions: Iterable[int]) -> list[SpanBody]:
    """Runs of equal versions."""
    spans: list[SpanBody] = []
    for at, version in enumerate(versions):
        if spans and spans[-1].version == str(version):
            spans[-1] = SpanBody(str(version), spans[-1].start, at + 1)
        else:
            spans.append(SpanBody(str(version), at, at + 1))
    return spans


def _finish_body(finish: Finish, length: int) -> FinishBody:
    return FinishBody(type=finish.reason.value, matched=finish.matched, length=length if finish.reason is FinishReason.LENGTH else None)
