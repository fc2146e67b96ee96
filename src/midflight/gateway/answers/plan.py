"""From a checked call to the generations that answer it. Synchronous: every fault of the client shows here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from midflight.errors import RequestRejected, UnknownModel, nearest
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.sampling import Limits, check_prompt, params_for, samples_the_policy
from midflight.gateway.sessions.call import CompletionCall, Messages, ToolChoice
from midflight.gateway.sessions.node import Prompt
from midflight.gateway.sessions.session import Session
from midflight.text import Tokenizer
from midflight.text.formats import MessageFormat, MessageParser
from midflight.types import GenerateRequest, SamplingParams

MAX_CHOICES = 1024
"""Choices of one call, over all its prompts: each is a generation of its own, and a batch is not a way round admission."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A checked call, ready to run."""

    session: Session
    call: CompletionCall
    answers: tuple[Answer, ...]
    """One for each choice, to be generated."""

    request_id: str
    """Of the first answer; the client knows the whole by it."""


class Planner:
    """Numbers the requests of a run, and gives each its tokens, its sampling and its seed."""

    def __init__(
        self, tokenizer: Tokenizer, message_format: MessageFormat, *, model: str, limits: Limits, run_name: str, run_seed: int
    ) -> None:
        self._tokenizer, self._format = tokenizer, message_format
        self._model, self._limits = model, limits
        self._run_name, self._run_seed = run_name, run_seed
        self._prefix = secrets.token_hex(4)
        self._serial = 0

    def plan(self, session: Session, call: CompletionCall) -> Job:
        """Checks a call and plans its tokens. Raises `RequestRejected` and kin; nothing has been generated then."""
        if call.model is not None and call.model != self._model:
            raise UnknownModel(f"the model {call.model!r} does not exist.{nearest(call.model, [self._model])}", param="model")
        if not 1 <= len(call.sources) * call.n <= MAX_CHOICES:
            raise RequestRejected(f"{len(call.sources)} prompts with n = {call.n}: ask for 1 to {MAX_CHOICES} choices at once.", param="n")
        prompts = [session.plan(source) for source in call.sources]
        for prompt in prompts:
            check_prompt(prompt.ids, self._limits, param=call.prompt_param)
        calls = [self._constrained(call, prompt) for prompt in prompts]
        params = [
            params_for(each, len(prompt.ids), defaults=session.sampling, limits=self._limits)
            for each, prompt in zip(calls, prompts, strict=True)
        ]
        answers = [
            self._answer(session, call, place * call.n + k, prompt, sampling, number)
            for place, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
            for number in [session.next_request()]
            for k in range(call.n)
        ]
        return Job(session, call, tuple(answers), answers[0].request_id)

    def _constrained(self, call: CompletionCall, prompt: Prompt) -> CompletionCall:
        """A tool call that must come is sampled under a grammar; so is a response format after thinking, or a call instead of it."""
        source, grammar = call.sources[0], call.asked.grammar
        if not isinstance(source, Messages) or (grammar is None and call.tool_choice is not ToolChoice.REQUIRED):
            return call
        if call.tool_choice is ToolChoice.REQUIRED:
            tools = [tool for tool in source.tools if call.forced_tool in (None, tool.name)]
            grammar = self._format.calls_grammar(tools, parallel=call.parallel_tool_calls, prompt_text=prompt.text)
        elif grammar is not None and call.tool_choice is ToolChoice.AUTO:
            parallel = call.parallel_tool_calls
            grammar = self._format.calls_or(grammar, source.tools, parallel=parallel, prompt_text=prompt.text)
        elif grammar is not None:
            grammar = self._format.after_thinking(grammar, prompt_text=prompt.text)
        return replace(call, asked=call.asked.constrained(grammar))

    def _answer(self, session: Session, call: CompletionCall, index: int, prompt: Prompt, sampling: SamplingParams, number: int) -> Answer:
        self._serial += 1
        seed = session.seed(self._run_name, self._run_seed, prompt.ids, asked=call.asked.number("seed"), choice=index % call.n)
        single = len(call.sources) * call.n == 1
        own = call.request_id if call.request_id is None or single else f"{call.request_id}-{index}"
        request = GenerateRequest(
            request_id=own or f"{session.session_id}.{self._prefix}{self._serial:08d}",
            input_ids=prompt.ids,
            num_prompt_tokens=len(prompt.ids),
            sampling=replace(sampling, seed=seed),
            eager=call.stream,
        )
        return Answer(
            request,
            prompt,
            self._tokenizer,
            index=index,
            number=number,
            policy_sampled=samples_the_policy(sampling, session.sampling, limits=self._limits),
            parser=self._parser(call, prompt),
            keep=self._format.kept_token_ids,
            one_call=not call.parallel_tool_calls,
        )

    def _parser(self, call: CompletionCall, prompt: Prompt) -> MessageParser | None:
        """What reads the answer to a chat."""
        source, chosen = call.sources[0], call.tool_choice
        if not isinstance(source, Messages):
            return None
        calls, forced = chosen is not ToolChoice.NONE, chosen is ToolChoice.REQUIRED
        return self._format.parser(prompt.text, calls=calls, forced=forced, tools=source.tools)
