"""Reward functions by the names of `trl.rewards`."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from midflight.errors import ConfigError

Completion = str | Sequence[dict[str, Any]]
_THINKING = re.compile(r"<think>(?!.*<think>)(.*?)</think>.*", re.DOTALL)


def _text(completion: Completion) -> str:
    """The text of a completion, or of the first message of one with messages."""
    return completion if isinstance(completion, str) else str(completion[0].get("content") or "")


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str], **columns: Any
) -> list[float | None]:
    """1 if the completion means the same as the solution, as math-verify judges, else 0. None where
    the solution is no expression.
    """
    del columns
    return [
        _accuracy(_text(completion), expected)
        for completion, expected in zip(completions, solution, strict=True)
    ]


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] = ("</think>",),
    **columns: Any,
) -> list[float | None]:
    """The same of what comes after the reasoning. A completion whose reasoning does not end has
    0.
    """
    del columns
    found: list[float | None] = []
    for completion, expected in zip(completions, solution, strict=True):
        text = _text(completion)
        ends = [text.rfind(mark) + len(mark) for mark in reasoning_delimiters if mark in text]
        found.append(_accuracy(text[max(ends) :], expected) if ends else 0.0)
    return found


def think_format_reward(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """1 if the completion is one thought between `<think>` and `</think>`, and what follows it;
    else 0.
    """
    del columns
    return [float(_THINKING.fullmatch(_text(said)) is not None) for said in completions]


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """DAPO's penalty for length (2503.14476, eq. 13), in tokens: 0, then falling to -1 over the
    last `soft_punish_cache`, and -1 beyond `max_completion_len`.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ConfigError(
            f"soft_punish_cache is {soft_punish_cache}: it is more than 0, and at most "
            f"max_completion_len ({max_completion_len})."
        )

    def soft_overlong_punishment(
        completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        del completions, columns
        begin = max_completion_len - soft_punish_cache
        shares = [(len(ids) - begin) / soft_punish_cache for ids in completion_ids]
        return [-min(1.0, max(0.0, share)) for share in shares]

    return soft_overlong_punishment


def get_repetition_penalty_reward(
    ngram_size: int = 3, max_penalty: float = -1.0
) -> Callable[..., list[float]]:
    """`max_penalty` times the share of runs of `ngram_size` tokens that occurred before
    (2502.03373, appendix C).
    """

    def repetition_penalty_reward(
        completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        del completions, columns
        return [max_penalty * _repeated(ids, ngram_size) for ids in completion_ids]

    return repetition_penalty_reward


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """`accuracy_reward`, scaled by length: short right answers have most and short wrong ones least
    (2502.03373, appendix C.1).

        reward = long + (short - long) (1 + cos(π length / max_len)) / 2
    """

    def cosine_scaled_reward(
        completions: Sequence[Completion],
        solution: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        del columns
        found: list[float | None] = []
        right = accuracy_reward(completions, solution)
        for accuracy, ids in zip(right, completion_ids, strict=True):
            if accuracy is None:
                found.append(None)
                continue
            short = max_value_correct if accuracy else min_value_wrong
            long = min_value_correct if accuracy else max_value_wrong
            share = (1 + math.cos(math.pi * min(1.0, len(ids) / max_len))) / 2
            found.append(long + (short - long) * share)
        return found

    return cosine_scaled_reward


def _repeated(ids: Sequence[int], size: int) -> float:
    """The share of runs of `size` tokens that occurred before."""
    runs = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _accuracy(text: str, expected: str) -> float | None:
    """Whether the LaTeX in the text means what the solution does. None if that is no expression."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ConfigError(
            "this reward needs the package math-verify; install it with: pip install "
            "'midflight[math]'."
        ) from error
    deadline: Any = None  # its own deadlines want the main thread; the rollout's holds here
    solution = parse(expected, parsing_timeout=deadline)
    if not solution:
        return None
    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    answer = parse(
        text,
        extraction_config=[latex],
        extraction_mode="first_match",
        parsing_timeout=deadline,
    )
    return float(verify(solution, answer, timeout_seconds=deadline))
