"""Answers as tests generate them and look at them."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence

from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.generation import Generator
from midflight.gateway.sessions.history import Prompt
from midflight.gateway.sessions.session import Session
from midflight.testing.script import scripted_tokenizer
from midflight.text import Tokenizer
from midflight.text.formats import AssistantMessage, Piece
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, Likely, SamplingParams, Turn

TOKENIZER = scripted_tokenizer()


class Heard(Answer):
    """An answer that keeps what it accepted of each chunk."""

    def __init__(self, request: GenerateRequest, *, tokenizer: Tokenizer = TOKENIZER, policy_sampled: bool = True) -> None:
        super().__init__(request, Prompt(request.input_ids, None), tokenizer, policy_sampled=policy_sampled)
        self.chunks: list[Chunk] = []

    def accept(self, chunk: Chunk, *, vocab_size: int) -> None:
        before = len(self.output_ids)
        super().accept(chunk, vocab_size=vocab_size)
        if len(self.output_ids) > before or chunk.attested or self.finish is not None:
            ids, logprobs = tuple(self.output_ids[before:]), tuple(self.logprobs[before:])
            self.chunks.append(Chunk(ids, logprobs, chunk.version, chunk.kv_version, self.finish, (), chunk.attested))

    def whole(self) -> list[Chunk]:
        """Its chunks; the last one, and only that, carries `finish`."""
        if not self.chunks or self.chunks[-1].finish is None:
            self.chunks.append(Chunk((), (), 0, 0, self.finish))
        return self.chunks


def generated(
    generator: Generator, request: GenerateRequest, *, affinity: str, may_abort: bool = False
) -> Coroutine[object, object, list[Chunk]]:
    """Waits for the chunks of one answer. Its place in the order of arrival is taken now."""
    answer = Heard(request)
    generating = generator.generate(answer, affinity=affinity, may_abort=may_abort)

    async def finished() -> list[Chunk]:
        await generating
        return answer.whole()

    return finished()


def closed(
    answer: Answer,
    turn: Turn,
    *,
    message: AssistantMessage,
    tail: str = "",
    tail_pieces: Sequence[Piece] = (),
    top_logprobs: Sequence[Likely] = (),
) -> Answer:
    """The answer as if it had become this turn, of which `tail` was not told."""
    answer.output_ids, answer.logprobs, answer.top_logprobs = list(turn.output_ids), list(turn.logprobs), list(top_logprobs)
    answer.text, answer.message, answer.tail, answer.tail_pieces = message.content, message, tail, tuple(tail_pieces)
    answer.finish, answer._turn = turn.finish, turn
    return answer


def letters(num: int) -> Chunk:
    """So many letters at once, and the end."""
    return Chunk((97,) * num, (-0.5,) * num, 0, 0, Finish(FinishReason.LENGTH))


def begun(session: Session, prompt: Prompt, *, number: int = 1, policy_sampled: bool = True) -> Answer:
    """An answer under way in this session, with room for every token."""
    request = GenerateRequest("r", prompt.ids, len(prompt.ids), SamplingParams(max_tokens=100_000), eager=False)
    answer = Answer(request, prompt, TOKENIZER, number=number, policy_sampled=policy_sampled)
    session.begin(answer)
    return answer


def receive(answer: Answer, chunk: Chunk, *, num_overshoot: int = 0) -> None:
    """The chunk of any engine."""
    answer.accept(chunk, vocab_size=2**31)
    answer.num_overshoot = num_overshoot
