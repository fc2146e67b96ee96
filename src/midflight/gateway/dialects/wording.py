"""Pieces of answers that more than one dialect writes."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.gateway.call import Answer
from midflight.text import Tokenizer
from midflight.types import Json, Turn


def usage(answers: Sequence[Answer]) -> Json:
    """OpenAI's token counts: a prompt counts once, however many choices it has."""
    prompts = {id(answer.prompt): len(answer.prompt.ids) for answer in answers}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(len(answer.turn.output_ids) for answer in answers)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}


def weight_versions(turn: Turn) -> Json:
    """Spans of output tokens by the version that sampled them."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in turn.segments]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token on its own; half a character is written as U+FFFD."""
    return tokenizer.decode((token_id,))


def token_bytes(tokenizer: Tokenizer, token_id: int) -> Json:
    table = tokenizer.token_bytes
    raw = token_text(tokenizer, token_id).encode() if table is None else table.get(token_id, b"")
    return list(raw)
