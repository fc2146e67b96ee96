"""From a checked call to the answers that are to be generated: their tokens, their sampling and
their seeds. Synchronous: every fault of the client shows here.
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
from midflight.gateway.sessions.request import CompletionCall, Messages, ToolChoice
from midflight.gateway.sessions.session import Session
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat, Tool
from midflight.types import (
    Capabilities,
    Feature,
    GenerateRequest,
    Kind,
    LogprobKind,
    SamplingParams,
)
from midflight.types.generation import FEATURED


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engines can take."""

    max_context: int
    """Prompt plus answer, in tokens."""
    vocab_size: int
    features: frozenset[Feature] = frozenset()
    """What every engine can do."""
    honours_seed: bool = True
    """Whether every engine does."""
    logprob_kinds: frozenset[LogprobKind] = frozenset({LogprobKind.SAMPLED})
    """Those of all engines."""

    @classmethod
    def of(
        cls, engines: Sequence[Capabilities], *, without: frozenset[Feature] = frozenset()
    ) -> EngineLimits:
        """What all of them can take, less what is not wanted."""
        smallest = min(engines, key=lambda engine: engine.max_context)
        return cls(
            max_context=smallest.max_context,
            vocab_size=smallest.vocab_size,
            features=frozenset.intersection(*(engine.features for engine in engines)) - without,
            honours_seed=all(engine.honours_seed for engine in engines),
            logprob_kinds=frozenset(engine.logprob_kind for engine in engines),
        )

    def lacking(self, engine: Capabilities) -> str:
        """What keeps an engine that comes later from taking what these do; empty where nothing
        does.
        """
        if engine.vocab_size != self.vocab_size:
            return f"its vocabulary has {engine.vocab_size} ids, that of the run {self.vocab_size}"
        if engine.max_context < self.max_context:
            return (
                f"it takes {engine.max_context} tokens of prompt and answer, the run needs "
                f"{self.max_context}"
            )
        if missing := sorted(self.features - engine.features):
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


def check_prompt(ids: tuple[int, ...], limits: EngineLimits, *, param: str) -> None:
    """Refuses a prompt that no engine could take: empty, with unknown ids, or without room for one
    token of answer.
    """
    if not ids:
        raise RequestRejected(f"{param} is empty: send at least one token.", param=param)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RequestRejected(
            f"{param} holds token id {bad}: send ids from 0 to {limits.vocab_size - 1}.",
            param=param,
        )
    if len(ids) + 1 > limits.max_context:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but the {param} "
            f"has {len(ids)} tokens and leaves no room for an answer. Shorten the {param}.",
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
    """The client's wishes over the session's defaults over the dialect's. `max_tokens` shrinks to
    the room there is; with `strict` an explicit one must fit."""
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
    merged = {
        **asked.given,
        "max_tokens": max_tokens,
        "min_tokens": _min_tokens(call, own, max_tokens),
    }
    params = own.changed(**{"top_logprobs": 0, **merged})
    _check_ids("stop_token_ids", "holds", params.stop_token_ids, call, limits)
    _check_ids("logit_bias", "names token", [i for i, _ in params.logit_bias], call, limits)
    return params


def samples_the_policy(
    params: SamplingParams, defaults: SamplingParams | None, *, limits: EngineLimits
) -> bool:
    """Whether the trainer's distribution is the one sampled: at the session's temperature, and
    truncated only where engines say of each token what was kept.

    If an engine leaves the temperature out of its log-probabilities, they belong to another
    distribution, unless it is 1.
    """
    told = params.temperature == 1 or LogprobKind.RAW not in limits.logprob_kinds
    recorded = params.truncates_the_policy and Feature.SAMPLING_MASKS in limits.features
    return (
        told
        and (params.samples_the_policy or recorded)
        and (defaults is None or params.temperature == defaults.temperature)
    )


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
    """Refuses what the engines cannot do, by the client's own name for it."""
    given = call.asked.given
    for lacking in (
        p
        for p in FEATURED
        if p.name in given and given[p.name] != p.default and p.feature not in limits.features
    ):
        param = call.name_of(lacking.name)
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
    """Refuses ids that the vocabulary does not have."""
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


MAX_CHOICES = 1024
"""Choices of one call, over all its prompts, at most. Each is a generation of its own, and a batch
must not get round admission.
"""


class Job(msgspec.Struct, frozen=True, eq=False):
    """A checked call, ready to run."""

    session: Session
    call: CompletionCall
    answers: tuple[Answer, ...]
    """One for each choice, to be generated."""

    request_id: str
    """The id of the first answer, by which the client knows the request."""
    clamped: str = ""
    """The client's limit that was above the room there is, and what it is now; empty where it
    fits.
    """
    loose: bool = False
    """Whether tools were to be strict, and calls of them are sampled without their schemas."""


class _Planned(msgspec.Struct, frozen=True, eq=False):
    """How a prompt's answers are sampled, and of what that was made."""

    prompt: Prompt
    own: SamplingParams | None
    asked: tuple[Mapping[str, object], int | None]
    sampling: SamplingParams
    policy_sampled: bool


class Planner:
    """Numbers the requests of a run, and gives each its tokens, its sampling and its seed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        message_format: MessageFormat,
        *,
        model: str,
        limits: EngineLimits,
        run: tuple[str, int],
        strict: bool = False,
    ) -> None:
        """`run`: its name and seed. `strict`: a limit above the room there is is refused, not
        lowered.
        """
        self._tokenizer = tokenizer
        self._format = message_format
        self._model = model
        self._limits = limits
        (self._run_name, self._run_seed), self._strict = run, strict
        self._prefix = secrets.token_hex(4)
        self._serial = 0
        self._last: _Planned | None = None

    def plan(self, session: Session, call: CompletionCall) -> Job:
        """Checks a call and plans its tokens. Raises `RequestRejected` and kin; nothing has been
        generated then.
        """
        if call.model is not None and call.model != self._model:
            raise UnknownModel(
                f"the model {call.model!r} does not exist.{nearest(call.model, [self._model])}",
                param="model",
            )
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
                check_prompt(prompt.ids, self._limits, param=call.prompt_param)
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
        answers = [
            self._answer(session, call, place * call.n + k, each, number)
            for place, each in enumerate(planned)
            for number in [session.next_request()]
            for k in range(call.n)
        ]
        explicit = call.asked.number("max_tokens")
        least = min([each.sampling.max_tokens for each in planned])
        clamped = (
            "" if explicit is None or explicit <= least else f"{call.name_of('max_tokens')}={least}"
        )
        return Job(session, call, tuple(answers), answers[0].request_id, clamped, loose)

    def _planned(
        self, call: CompletionCall, prompt: Prompt, own: SamplingParams | None
    ) -> _Planned:
        """Rollouts of a group ask the same of a prompt that they share, mostly one after the
        other.
        """
        last = self._last
        asked = (call.asked.given, call.default_max_tokens)
        if last is None or last.prompt is not prompt or last.own is not own or last.asked != asked:
            sampling = params_for(
                call, len(prompt.ids), defaults=own, limits=self._limits, strict=self._strict
            )
            last = self._last = _Planned(
                prompt, own, asked, sampling, samples_the_policy(sampling, own, limits=self._limits)
            )
        return last

    def _strict_calls_lack(self, session: Session) -> bool:
        """Whether calls amid free text are not sampled under their schemas: a turn under a grammar
        is not the policy's, and would leave the training that its session is for. A strict gateway
        refuses."""
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
        """A tool call that must come is sampled under a grammar; so is a response format after
        thinking, or a call instead of it, and with `amid_text` a call that may come."""
        source = call.sources[0]
        grammar = call.asked.grammar
        if not isinstance(source, Messages) or (
            grammar is None and not amid_text and call.tool_choice is not ToolChoice.REQUIRED
        ):
            return call
        if amid_text:
            grammar = self._format.calls_amid_text(
                source.tools, parallel=call.parallel_tool_calls, prompt_text=prompt.text
            )
        elif call.tool_choice is ToolChoice.REQUIRED:
            tools = [tool for tool in source.tools if call.forced_tool in (None, tool.name)]
            grammar = self._format.calls_grammar(
                tools, parallel=call.parallel_tool_calls, prompt_text=prompt.text
            )
        elif grammar is not None and call.tool_choice is ToolChoice.AUTO:
            parallel = call.parallel_tool_calls
            grammar = self._format.calls_or(
                grammar, source.tools, parallel=parallel, prompt_text=prompt.text
            )
        elif grammar is not None:
            grammar = self._format.after_thinking(grammar, prompt_text=prompt.text)
        return replace(call, asked=call.asked.constrained(grammar))

    def _answer(
        self, session: Session, call: CompletionCall, index: int, planned: _Planned, number: int
    ) -> Answer:
        prompt = planned.prompt
        sampling = planned.sampling
        policy_sampled = planned.policy_sampled
        self._serial += 1
        own_seed = call.asked.number("seed")
        seed = session.seed(
            self._run_name, self._run_seed, prompt, asked=own_seed, choice=index % call.n
        )
        single = len(call.sources) * call.n == 1
        own = call.request_id if call.request_id is None or single else f"{call.request_id}-{index}"
        truncated = policy_sampled and sampling.truncates_the_policy
        # Rows that an owner reads have no records: there such a turn is context.
        wants_kept = truncated and session.key is not None and session.key.kind is Kind.TRAINING
        chat = self._chat(call, prompt)
        request = GenerateRequest(
            request_id=own or f"{session.session_id}.{self._prefix}{self._serial:08d}",
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
            policy_sampled=policy_sampled and wants_kept is truncated,
            chat=chat,
        )

    def _chat(self, call: CompletionCall, prompt: Prompt) -> ChatReading | None:
        """`None` where the answer is not a message."""
        source = call.sources[0]
        chosen = call.tool_choice
        if not isinstance(source, Messages):
            return None
        calls = chosen is not ToolChoice.NONE
        forced = chosen is ToolChoice.REQUIRED
        parser = self._format.parser(
            prompt.text, calls=calls, forced=forced, tools=source.tools, partly=call.stream
        )
        # The grammar of a call that must come allows no second one.
        return ChatReading(
            parser,
            self._format.kept_token_ids,
            one_call=chosen is ToolChoice.AUTO and not call.parallel_tool_calls,
        )
