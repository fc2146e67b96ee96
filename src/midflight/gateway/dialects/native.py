"""The native dialect: `POST /generate` with the JSON that SGLang's clients write and read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field, JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.call import Answer, Asked, CompletionCall, Delta, Event
from midflight.gateway.dialects.completions import sources
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.dialects.fields import Body, Probability, Tokens, parse, refuse_unknown_within, stops, top_k
from midflight.gateway.dialects.wording import weight_versions
from midflight.types import FinishReason, Json

DEFAULT_MAX_TOKENS = 128
"""SGLang's default."""


class NativeSampling(Body):
    max_new_tokens: Tokens | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None

    def asked(self) -> Asked:
        return Asked(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=top_k(self.top_k),
            min_p=self.min_p,
            stop=stops(self.stop),
            stop_token_ids=None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.sampling_seed,
        )


class NativeBody(Body):
    text: JsonValue = None
    input_ids: JsonValue = None
    sampling_params: NativeSampling | None = None
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, le=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=0)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None


class NativeExchange:
    """One request. A single answer is an object, several are a list. Stream frames are cumulative."""

    def __init__(self, body: bytes) -> None:
        parsed = parse(NativeBody, body)
        sampling = parsed.sampling_params or NativeSampling()
        refuse_unknown_within(sampling, "sampling_params")
        if (parsed.text is None) == (parsed.input_ids is None):
            raise RequestRejected("text and input_ids: send exactly one of them.", param="input_ids")
        param = "text" if parsed.input_ids is None else "input_ids"
        self._logprobs = bool(parsed.return_logprob)
        self._listed = (sampling.n or 1) > 1 or _is_batch(parsed.text if parsed.input_ids is None else parsed.input_ids)
        self._so_far: dict[int, tuple[str, list[int], list[float]]] = {}
        self.call = CompletionCall(
            sources=sources(parsed.text if parsed.input_ids is None else parsed.input_ids, param=param),
            asked=sampling.asked(),
            n=sampling.n or 1,
            stream=bool(parsed.stream),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            request_id=parsed.rid,
            may_abort=True,
            prompt_param=param,
            max_tokens_param="sampling_params.max_new_tokens",
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        bodies: list[Json] = [self._answer(answer) for answer in answers]
        return bodies if self._listed else bodies[0]

    def opening(self, reply: Reply) -> Iterable[Json]:
        return ()

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if isinstance(event, Delta):
            text, ids, logprobs = self._so_far.setdefault(event.choice, ("", [], []))
            ids += event.token_ids
            logprobs += event.logprobs
            self._so_far[event.choice] = (text + event.text, ids, logprobs)
            yield self._partial(reply, event.choice)
        else:
            yield self._answer(event)

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        return ()

    def _partial(self, reply: Reply, index: int) -> Json:
        text, ids, logprobs = self._so_far[index]
        choice = reply.job.choices[index]
        meta = self._meta(choice.request.request_id, len(choice.prompt.ids), ids, logprobs)
        return {"index": index, "text": text, "output_ids": list(ids), "meta_info": meta | {"finish_reason": None}}

    def _answer(self, answer: Answer) -> Json:
        turn = answer.turn
        meta = self._meta(answer.request_id, len(turn.prompt_ids), turn.output_ids, turn.logprobs)
        meta |= {
            "finish_reason": _finish_reason(answer),
            "weight_versions": weight_versions(turn),
            "weight_version": str(turn.segments[-1].version) if turn.segments else None,
            "num_retractions": turn.num_resumes,
        }
        return {"index": answer.choice, "text": answer.text, "output_ids": list(turn.output_ids), "meta_info": meta}

    def _meta(self, request_id: str, num_prompt: int, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Json]:
        meta: dict[str, Json] = {"id": request_id, "prompt_tokens": num_prompt, "completion_tokens": len(ids), "cached_tokens": 0}
        if self._logprobs:
            meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(logprobs, ids, strict=True)]
        return meta


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
