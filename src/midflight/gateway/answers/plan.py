"""Plans the answers of a call: their tokens, their sampling and their seeds. Synchronous. Every
fault of the client is found here.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from midflight.errors import ContextExceeded, RequestRejected, UnknownModel, nearest
from midflight.gateway.answers.answer import Answer, ChatReading
from midflight.gateway.sessions.history import Prompt
from midflight.gateway.sessions.request import Asked, CompletionCall, Messages, ToolChoice
from midflight.gateway.sessions.session import Session
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat, Tool
from midflight.types import (
    Capabilities,
    Feature,
    GenerateRequest,
    Kind,
    LogprobKind,
    Reason,
    SamplingParams,
)
from midflight.types.generation import FEATURED, OWN_SAMPLING


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of the engines behind the gateway."""

    max_context: int
    """The most tokens of prompt plus answer."""
    vocab_size: int
    features: frozenset[Feature] = frozenset()
    """The features that every engine has."""
    honours_seed: bool = True
    """True if every engine honours seeds."""
    logprob_kinds: frozenset[LogprobKind] = frozenset({LogprobKind.SAMPLED})
    """The kinds of log-probabilities of all engines."""

    @classmethod
    def of(
        cls, engines: Sequence[Capabilities], *, without: frozenset[Feature] = frozenset()
    ) -> EngineLimits:
        """The limits that all of these engines meet, without the features that are not wanted."""
        smallest = min(engines, key=lambda engine: engine.max_context)
        return cls(
            max_context=smallest.max_context,
            vocab_size=smallest.vocab_size,
            features=frozenset.intersection(*(engine.features for engine in engines)) - without,
            honours_seed=all(engine.honours_seed for engine in engines),
            logprob_kinds=frozenset(engine.logprob_kind for engine in engines),
        )

    def lacking(self, engine: Capabilities) -> str:
        """Returns why an engine that joins later does not meet these limits. Empty if it does."""
        if engine.vocab_size != self.vocab_size:
            return f"its vocabulary has {engine.vocab_size} ids, that of the run {self.vocab_size}"
        if engine.max_context < self.max_context:
            return (
                f"it takes {engine.max_context} tokens of prompt and answer, the run needs "
                f"{self.max_context}"
            )
        missing = sorted(self.features - engine.features)
        if missing:
            return f"it cannot do {', '.join(missing)}, which agents of the run are offered"
        if self.honours_seed and not engine.honours_seed:
            return "it does not honour seeds, which the engines of the run do"
        if engine.logprob_kind not in self.logprob_kinds:
            kinds = " or ".join(sorted(self.logprob_kinds))
            return (
                f"its log-probabilities are of another kind ({engine.logprob_kind}) than those "
                f"that the run reckons with ({kinds})"
            )
        return ""


def check_prompt(prompt: Prompt, limits: EngineLimits, *, param: str) -> None:
    """Refuses a prompt that no engine could take, because it is empty, has unknown ids, or leaves
    no room for one token of answer. The ids of a turn that it continues were looked at before.
    """
    num_ids = len(prompt.ids)
    if not num_ids:
        raise RequestRejected(f"{param} is empty: send at least one token.", param=param)
    ids = prompt.new_ids
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RequestRejected(
            f"{param} holds token id {bad}: send ids from 0 to {limits.vocab_size - 1}.",
            param=param,
        )
    if num_ids + 1 > limits.max_context:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but the {param} "
            f"has {num_ids} tokens and leaves no room for an answer. Shorten the {param}.",
            param=param,
        )


def params_for(
    call: CompletionCall,
    num_prompt_tokens: int,
    *,
    defaults: SamplingParams | None,
    limits: EngineLimits,
    strict: bool = False,
) -> SamplingParams:
    """The sampling parameters of a call. The client's values come first, then the session's
    defaults, then the dialect's. `max_tokens` shrinks to the room there is; with `strict` an
    explicit limit must fit.
    """
    asked = call.asked
    own = defaults or SamplingParams()
    _check_features(call, limits)
    room = limits.max_context - num_prompt_tokens
    default = own.max_tokens if defaults is not None else (call.default_max_tokens or room)
    explicit = asked.number("max_tokens")
    max_tokens = min(default if explicit is None else explicit, room)
    if strict and explicit is not None and explicit > room:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but you asked "
            f"for {num_prompt_tokens + explicit} tokens ({num_prompt_tokens} in the "
            f"{call.prompt_param}, {explicit} in the answer). Shorten one of them.",
            param=call.name_of("max_tokens"),
        )
    merged: dict[str, object] = {"top_logprobs": 0, **asked.given}
    merged["max_tokens"] = max_tokens
    merged["min_tokens"] = _min_tokens(call, own, max_tokens)
    params = own.changed(**merged)
    _check_ids("stop_token_ids", "holds", params.stop_token_ids, call, limits)
    _check_ids("logit_bias", "names token", [i for i, _ in params.logit_bias], call, limits)
    return params


def unlike_the_policy(
    params: SamplingParams, defaults: SamplingParams | None, *, limits: EngineLimits
) -> tuple[str, ...]:
    """The parameters for which the sampled distribution is not the trainer's. It must have the
    session's temperature, and may be truncated only if engines record for each token what was kept.

    If an engine leaves the temperature out of its log-probabilities, they belong to another
    distribution, unless the temperature is 1.
    """
    raw = params.temperature != 1 and LogprobKind.RAW in limits.logprob_kinds
    if raw or (defaults is not None and params.temperature != defaults.temperature):
        others = [name for name in params.reshaped_by if name != "temperature"]
        return ("temperature", *others)
    if params.samples_the_policy:
        return ()
    if params.truncates_the_policy and Feature.SAMPLING_MASKS in limits.features:
        return ()
    return params.reshaped_by


def of_the_run(
    call: CompletionCall, own: SamplingParams
) -> tuple[CompletionCall, Mapping[str, object]]:
    """The call without the sampling in whose place the session's own is put, and what took the
    place of each field, by the client's names. A seed is replaced too: the rollouts of a group that
    share one would all say the same.
    """
    given = call.asked.given
    others = {name: value for name, value in given.items() if name not in OWN_SAMPLING}
    replaced: dict[str, object] = {}
    for name in OWN_SAMPLING.intersection(given):
        if name == "seed":
            replaced[call.name_of(name)] = "own"
        elif given[name] != getattr(own, name):
            replaced[call.name_of(name)] = getattr(own, name)
    in_order = {name: replaced[name] for name in sorted(replaced)}
    return replace(call, asked=Asked(**others)), in_order


def _min_tokens(call: CompletionCall, own: SamplingParams, max_tokens: int) -> int:
    asked = call.asked.number("min_tokens")
    if asked is None:
        return min(own.min_tokens, max_tokens)
    name = call.name_of("min_tokens")
    most = call.asked.number("max_tokens") or max_tokens
    if asked > most:
        raise RequestRejected(
            f"{name} is {asked}, above {call.name_of('max_tokens')} = {most}: lower it.", param=name
        )
    return min(asked, max_tokens)


def _check_features(call: CompletionCall, limits: EngineLimits) -> None:
    """Refuses parameters that the engines cannot honour, by the client's own names for them."""
    given = call.asked.given
    for parameter in FEATURED:
        name = parameter.name
        if name not in given or given[name] == parameter.default:
            continue
        if parameter.feature in limits.features:
            continue
        param = call.name_of(name)
        raise RequestRejected(
            f"{param} is not supported by the engines behind this endpoint: leave it out.",
            param=param,
        )
    if "seed" in given and not limits.honours_seed:
        param = call.name_of("seed")
        raise RequestRejected(
            (
                f"{param} is not honoured by every engine behind this endpoint, which would sample "
                "anew each time: leave it out."
            ),
            param=param,
        )


def _check_ids(
    name: str, verb: str, ids: Sequence[int], call: CompletionCall, limits: EngineLimits
) -> None:
    """Refuses ids that are not in the vocabulary."""
    if not ids:
        return
    bad = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
    if bad is not None:
        param = call.name_of(name)
        raise RequestRejected(
            f"{param} {verb} {bad}: send ids from 0 to {limits.vocab_size - 1}.", param=param
        )


def tools_of(call: CompletionCall) -> Sequence[Tool]:
    source = call.sources[0]
    return source.tools if isinstance(source, Messages) else ()


def _masked_header(fields: Sequence[str]) -> bytes:
    parts = [Reason.NOT_POLICY_SAMPLED.value, *(f"field={name}" for name in fields)]
    return "; ".join(parts).encode()


MAX_CHOICES = 1024
"""The most choices of one call, over all its prompts. Each is a generation of its own, and a batch
must not bypass admission.
"""


class Job(msgspec.Struct, frozen=True, eq=False):
    """A checked call, ready to run."""

    session: Session
    call: CompletionCall
    answers: tuple[Answer, ...]
    """The answers to be generated, one for each choice."""

    request_id: str
    """The id of the first answer. The client knows the request by it."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of the answer: a limit that was lowered, sampling that was replaced, and the reason
    for which the answer is not trained.
    """
    loose: bool = False
    """True if the client asked for strict tools, but their calls are sampled without
    their schemas.
    """


class _PlannedSampling(msgspec.Struct, frozen=True, eq=False):
    """The sampling of a prompt's answers, together with the values that it was made from."""

    prompt: Prompt
    own: SamplingParams | None
    asked: tuple[Mapping[str, object], int | None]
    sampling: SamplingParams
    unlike: tuple[str, ...]
    """The parameters for which its distribution is not the policy's."""
    truncated: bool
    """True if its distribution is a part of the policy's."""


class Planner:
    """Numbers the requests of a run, and gives each one its tokens, its sampling and its seed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        message_format: MessageFormat,
        *,
        model: str,
        limits: EngineLimits,
        run: tuple[str, int],
        strict: bool = False,
        own_sampling: bool = False,
    ) -> None:
        """`run` is its name and seed. With `strict` a limit above the room there is gets refused
        instead of lowered. With `own_sampling` sessions that train keep to their own sampling.
        """
        self._tokenizer = tokenizer
        self._format = message_format
        self._model = model
        self._limits = limits
        self._run_name, self._run_seed = run
        self._strict = strict
        self._own_sampling = own_sampling
        self._prefix = secrets.token_hex(4)
        self._serial = 0
        self._last: _PlannedSampling | None = None

    def check_model(self, asked: str) -> None:
        """Raises `UnknownModel` for any model but the one that is served."""
        if asked != self._model:
            raise UnknownModel(
                f"the model {asked!r} does not exist.{nearest(asked, [self._model])}", param="model"
            )

    def plan(self, session: Session, call: CompletionCall) -> Job:
        """Checks a call and plans its tokens. Raises `RequestRejected` and kin before anything is
        generated.
        """
        if call.model is not None:
            self.check_model(call.model)
        if not 1 <= len(call.sources) * call.n <= MAX_CHOICES:
            raise RequestRejected(
                (
                    f"{len(call.sources)} prompts with n = {call.n}: ask for 1 to {MAX_CHOICES} "
                    "choices at once."
                ),
                param="n",
            )
        if (
            call.prompt_logprobs is not None
            and Feature.PROMPT_LOGPROBS not in self._limits.features
        ):
            param = call.name_of("prompt_logprobs")
            raise RequestRejected(
                f"{param}: the engines behind this endpoint score no prompts. Leave it out.",
                param=param,
            )
        prompts = [session.plan(source) for source in call.sources]
        for prompt in prompts:
            if self._last is None or self._last.prompt is not prompt:
                check_prompt(prompt, self._limits, param=call.prompt_param)
        replaced: Mapping[str, object] = {}
        if self._own_sampling and session.trains and session.sampling is not None:
            call, replaced = of_the_run(call, session.sampling)
        strict = (
            call.asked.grammar is None
            and call.tool_choice is ToolChoice.AUTO
            and any(tool.strict for tool in tools_of(call))
        )
        loose = strict and self._strict_calls_lack(session)
        calls = [
            self._constrained(call, prompt, amid_text=strict and not loose) for prompt in prompts
        ]
        planned = [
            self._planned(each, prompt, session.sampling)
            for each, prompt in zip(calls, prompts, strict=True)
        ]
        answers: list[Answer] = []
        masked_by: tuple[str, ...] = ()
        for each, constrained in zip(planned, calls, strict=True):
            number = session.next_request()
            masked_by = self._masked_by(session, constrained, each)
            for _ in range(call.n):
                answers.append(self._answer(session, call, len(answers), each, number, masked_by))
        explicit = call.asked.number("max_tokens")
        least = min([each.sampling.max_tokens for each in planned])
        headers: list[tuple[bytes, bytes]] = []
        if explicit is not None and explicit > least:
            clamped = f"{call.name_of('max_tokens')}={least}"
            headers.append((b"x-midflight-clamped", clamped.encode()))
        if replaced:
            session.count_replaced(replaced)
            values = ", ".join(f"{name}={value}" for name, value in replaced.items())
            headers.append((b"x-midflight-replaced", values.encode()))
        if masked_by and session.trains:
            headers.append((b"x-midflight-masked", _masked_header(masked_by)))
        return Job(session, call, tuple(answers), answers[0].request_id, tuple(headers), loose)

    def _masked_by(
        self, session: Session, call: CompletionCall, planned: _PlannedSampling
    ) -> tuple[str, ...]:
        """The fields for which the answers are masked, by the client's names. Rows that an outside
        owner reads have no records of truncation, so there a truncated turn is context.
        """
        unlike = planned.unlike
        if planned.truncated and not self._wants_kept(session):
            unlike = planned.sampling.truncated_by
        if not unlike:
            return ()
        given = call.asked.given
        return tuple(
            [call.name_of(name) if name in given else f"sampling.{name}" for name in unlike]
        )

    def _wants_kept(self, session: Session) -> bool:
        """True if the session's turns may have records of truncation."""
        return session.key is not None and session.key.kind is Kind.TRAINING

    def _planned(
        self, call: CompletionCall, prompt: Prompt, own: SamplingParams | None
    ) -> _PlannedSampling:
        """The sampling of a prompt's answers. The last result is reused, because the rollouts of a
        group send the same request for the prompt that they share, mostly one after the other.
        """
        last = self._last
        asked = (call.asked.given, call.default_max_tokens)
        if last is not None and last.prompt is prompt and last.own is own and last.asked == asked:
            return last
        sampling = params_for(
            call, len(prompt.ids), defaults=own, limits=self._limits, strict=self._strict
        )
        unlike = unlike_the_policy(sampling, own, limits=self._limits)
        truncated = not unlike and sampling.truncates_the_policy
        self._last = _PlannedSampling(prompt, own, asked, sampling, unlike, truncated)
        return self._last

    def _strict_calls_lack(self, session: Session) -> bool:
        """True if calls amid free text are sampled without their schemas. In a training session
        they are, because a turn under a grammar is not the policy's and could not be trained. A
        strict gateway refuses the call instead.
        """
        trains = session.key is not None and session.key.kind is Kind.TRAINING
        able = Feature.GRAMMARS in self._limits.features and self._format.announces_calls
        if able and not trains:
            return False
        if self._strict:
            why = (
                "its turns could not be trained"
                if able
                else "neither the model's form of calls nor every engine can hold to it"
            )
            raise RequestRejected(
                f"tools.strict: {why}. Leave it out, or set gateway.strict = false.",
                param="tools.strict",
            )
        return True

    def _constrained(
        self, call: CompletionCall, prompt: Prompt, *, amid_text: bool = False
    ) -> CompletionCall:
        """The call with the grammar that its answer is sampled under. There are four cases: a tool
        call that must come, a response format or a call instead of it, a response format after
        thinking, and, with `amid_text`, a call that may come.
        """
        source = call.sources[0]
        grammar = call.asked.grammar
        if not isinstance(source, Messages):
            return call
        if grammar is None and not amid_text and call.tool_choice is not ToolChoice.REQUIRED:
            return call
        if amid_text:
            grammar = self._format.calls_amid_text(
                source.tools, parallel=call.parallel_tool_calls, prompt_text=prompt.ending
            )
            call = replace(call, names={**call.names, "grammar": "tools.strict"})
        elif call.tool_choice is ToolChoice.REQUIRED:
            tools = [tool for tool in source.tools if call.forced_tool in (None, tool.name)]
            grammar = self._format.calls_grammar(
                tools, parallel=call.parallel_tool_calls, prompt_text=prompt.ending
            )
        elif grammar is not None and call.tool_choice is ToolChoice.AUTO:
            parallel = call.parallel_tool_calls
            grammar = self._format.calls_or(
                grammar, source.tools, parallel=parallel, prompt_text=prompt.ending
            )
        elif grammar is not None:
            grammar = self._format.after_thinking(grammar, prompt_text=prompt.ending)
        return replace(call, asked=call.asked.constrained(grammar))

    def _answer(
        self,
        session: Session,
        call: CompletionCall,
        index: int,
        planned: _PlannedSampling,
        number: int,
        masked_by: tuple[str, ...],
    ) -> Answer:
        prompt = planned.prompt
        sampling = planned.sampling
        self._serial += 1
        own_seed = call.asked.number("seed")
        seed = session.seed(
            self._run_name, self._run_seed, prompt, asked=own_seed, choice=index % call.n
        )
        single = len(call.sources) * call.n == 1
        own_id = call.request_id
        if own_id is not None and not single:
            own_id = f"{own_id}-{index}"
        wants_kept = planned.truncated and not masked_by
        chat = self._chat(call, prompt)
        request = GenerateRequest(
            request_id=own_id or f"{session.session_id}.{self._prefix}{self._serial:08d}",
            input_ids=prompt.ids,
            num_prompt_tokens=len(prompt.ids),
            sampling=sampling.changed(seed=seed),
            eager=call.stream or (chat is not None and chat.one_call),
            wants_kept=wants_kept,
            seeded=own_seed is not None,
        )
        return Answer(
            request,
            prompt,
            self._tokenizer,
            index=index,
            number=number,
            policy_sampled=not masked_by,
            masked_by=masked_by,
            chat=chat,
        )

    def _chat(self, call: CompletionCall, prompt: Prompt) -> ChatReading | None:
        """Returns how the answer is parsed, or `None` if it is not a message."""
        source = call.sources[0]
        chosen = call.tool_choice
        if not isinstance(source, Messages):
            return None
        calls = chosen is not ToolChoice.NONE
        forced = chosen is ToolChoice.REQUIRED
        # A whole answer is read as its stream would be, so that both are one message.
        parser = self._format.parser(
            prompt.ending, calls=calls, forced=forced, tools=source.tools, partly=True
        )
        # The grammar of a call that must come allows no second one.
        return ChatReading(
            parser,
            self._format.kept_token_ids,
            one_call=chosen is ToolChoice.AUTO and not call.parallel_tool_calls,
        )
