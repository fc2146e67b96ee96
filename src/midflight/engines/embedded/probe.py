"""The trial of the ways in which the engine can compute a model. A way is right if it gives the
model's own numbers. The ways are tried when the model is loaded, and the first that is right serves
it.

Sequences share steps and slots where that is right (`Runner`), else each goes alone
(`SequentialRunner`). If no cache of the model can be used, the whole sequence is computed for each
token (`WholeRunner`). A model for which nothing is right is refused by name. The trial covers
prefill at once and in parts, a prefix copied to another slot, decodes of several slots with a free
one between them, a slot that is used again, and scores in one stretch and in several.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.prefixes import KeepsSpans
from midflight.engines.embedded.runner import Runner, StepBatch
from midflight.engines.embedded.scoring import token_logprobs
from midflight.engines.embedded.sequential import SequentialRunner
from midflight.engines.embedded.whole import AnyRunner, WholeRunner
from midflight.errors import ConfigError
from midflight.models.proof import (
    LONGEST,
    TOLERANCE,
    Proof,
    Row,
    Way,
    attention_of,
    described,
    eagerly,
    is_small,
    kind_of,
    looks_ahead,
    own_logits,
    rows_to_try,
    stand_in,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Manner:
    """A way in which the engine computes a model."""

    lone: bool = False
    """Each sequence goes alone, in place of all in one pass."""
    serial: bool = False
    """A sequence that has a state goes on by one token at a time."""
    whole: bool = False
    """Nothing is kept, and for each token all tokens before it are computed again."""
    resumes: bool = True
    """Rows are scored in stretches, each over the keys of the stretches before."""


_MANNERS = (
    Manner(),
    Manner(serial=True),
    Manner(lone=True),
    Manner(lone=True, serial=True),
    Manner(whole=True),
)
_found: dict[tuple[str, int, int], tuple[Manner, Proof]] = {}
"""The earlier results. The key is the configuration, and limits. The result does not depend on the
weights.
"""


def engine_verdict(model: PreTrainedModel, *, max_context: int, max_batch_tokens: int) -> Proof:
    """Returns how the engine would serve the model. The model attends afterwards as before."""
    return _judge(model, max_context=max_context, max_batch_tokens=max_batch_tokens)[1]


def served(
    model: PreTrainedModel,
    *,
    max_running: int,
    max_context: int,
    max_batch_tokens: int,
) -> tuple[AnyRunner, Manner, str]:
    """The runner of a model, its way to compute, and a warning for people if that way is slower.

    Raises `ConfigError` if no way is right. It names the architecture and the remedy.
    """
    manner, verdict = _judge(model, max_context=max_context, max_batch_tokens=max_batch_tokens)
    if not verdict.is_right:
        raise ConfigError(f"loading the model into the embedded engine: {verdict.reason}")
    if verdict.reason:
        _log.warning("%s", verdict.reason)
    runner = _runner(model, manner, max_running=max_running, max_context=max_context)
    # A model that cannot run at all fails now, and not under a request.
    runner.forward(step_batch([(0, 0, np.zeros(1, dtype=np.int64))]))
    return runner, manner, verdict.reason


def _judge(
    model: PreTrainedModel, *, max_context: int, max_batch_tokens: int
) -> tuple[Manner, Proof]:
    described_model = f"{type(model).__name__} {model.config.to_json_string(use_diff=False)}"
    key = (described_model, max_context, max_batch_tokens)
    if key not in _found:
        before = attention_of(model)
        try:
            _found[key] = _tried(model, max_context=max_context, max_batch_tokens=max_batch_tokens)
        finally:
            model.set_attn_implementation(before)
    return _found[key]


def _tried(
    model: PreTrainedModel, *, max_context: int, max_batch_tokens: int
) -> tuple[Manner, Proof]:
    name = kind_of(model)
    longest = _longest(model)
    if longest is not None and max_context > longest:
        reason = (
            f"{name} turns positions by frequencies that depend on the length of the sequence once "
            f"it has more than {longest} tokens, so that what was computed of a token before is "
            f"wrong after; set model.max_context (now {max_context}) to at most {longest}, or "
            "engine.kind to vllm or sglang."
        )
        return Manner(), Proof("engine", Way.REFUSED, reason=reason)
    tried = model if is_small(model) else stand_in(model)
    rows = rows_to_try(tried, max_context=max_context)
    own = attention_of(tried)
    try:
        with eagerly(tried), torch.inference_mode():
            ahead = looks_ahead(tried, rows[0])
            expected = [own_logits(tried, row).log_softmax(-1) for row in rows]
    except ConfigError as error:
        return Manner(), Proof("engine", Way.REFUSED, reason=str(error))
    if ahead is not None:
        return Manner(), Proof("engine", Way.REFUSED, reason=ahead)
    errors = list[float]()
    failures = list[str]()
    for manner in _manners(model, max(max_context, max_batch_tokens)):
        tried.set_attn_implementation(own)
        try:
            found_error = _generation_error(tried, manner, rows, expected)
        except Exception as error:  # This is no way to compute the model.
            failures.append(described(error))
            continue
        errors.append(found_error)
        if found_error < TOLERANCE:
            slower = _slower(tried, manner, max_context)
            verdict = Proof("engine", _way(manner), found_error, reason=slower)
            return _with_scores(tried, manner, rows, expected, verdict)
    found = f"its log-probabilities are {min(errors):.2g} nats off" if errors else failures[-1]
    reason = f"{name} is not computed rightly by it ({found}); set engine.kind to vllm or sglang."
    return Manner(), Proof("engine", Way.REFUSED, min(errors, default=None), reason=reason)


def _longest(model: PreTrainedModel) -> int | None:
    """The number of tokens up to which rotary frequencies do not depend on the length of the
    sequence. `None` if they never do.
    """
    lengths: list[int] = []
    for module in model.modules():
        if str(getattr(module, "rope_type", "")) not in ("dynamic", "longrope"):
            continue
        length = _original_length(module, model)
        if length is not None:
            lengths.append(int(length))
    return min(lengths, default=None)


def _original_length(module: Any, model: PreTrainedModel) -> int | None:
    text: Any = model.config.get_text_config()
    if module.rope_type == "dynamic":
        return getattr(module, "original_max_seq_len", None) or text.max_position_embeddings
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    length = rope.get("original_max_position_embeddings")
    return length or getattr(text, "original_max_position_embeddings", None)


def _manners(model: PreTrainedModel, num_tokens: int) -> Sequence[Manner]:
    """The ways to try, the fastest first. If the model scales its attention by a place in the step,
    each step has one sequence once steps are long enough for it to matter.
    """
    text: Any = model.config.get_text_config()
    tunes = bool(getattr(text, "attn_temperature_tuning", False))
    by_place = tunes and num_tokens >= int(text.floor_scale)
    ways: list[Manner] = []
    for manner in _MANNERS:
        is_alone = manner.lone or manner.whole
        if by_place and not is_alone:
            continue
        ways.append(manner)
    return ways


def _runner(
    model: PreTrainedModel,
    manner: Manner,
    *,
    max_running: int,
    max_context: int,
) -> AnyRunner:
    if manner.whole:
        return WholeRunner(model)
    if manner.lone:
        return SequentialRunner(model, serial=manner.serial)
    return Runner(model, max_running=max_running, max_context=max_context, serial=manner.serial)


def _way(manner: Manner) -> Way:
    if manner.whole:
        return Way.WHOLE
    return Way.FALLBACK if manner.lone else Way.PACKED


def _slower(model: PreTrainedModel, manner: Manner, max_context: int) -> str:
    """The warning that people get about a slower way. Empty if the way is not slower."""
    name = kind_of(model)
    if manner.lone:
        return (
            f"{name} is served one sequence at a time: the same numbers, slower. With vllm or "
            "sglang as engine.kind sequences share a step."
        )
    if not manner.whole:
        return ""
    length = min(max_context, LONGEST)
    return (
        f"{name} is served without keeping anything of a sequence, which is computed whole for "
        f"each of its tokens: the same numbers, and slower the longer it is. At {length} tokens a "
        f"token takes {WholeRunner(model).slowdown(length):.1f} times as long as at the first "
        "(measured here), and sequences are computed one after the other. vllm or sglang as "
        "engine.kind may serve it faster."
    )


# --- The trial ------------------------------------------------------------------------------------


Plan = dict[int, tuple[int, int]]
"""The contents of a step: for each slot the row that it runs, and the number of the row's tokens
that it has afterwards.
"""


def _plan(rows: Sequence[Row]) -> tuple[list[Plan], int, list[Plan]]:
    """Steps, the length at which slot 0 is then copied to slot 2, and the steps after. Row 2 begins
    as row 0 does.
    """
    shared = min(len(rows[0]), len(rows[2]))
    fork = int((rows[0][:shared] != rows[2][:shared]).argmax())
    long = len(rows[0])
    middle = len(rows[3])
    before: list[Plan] = [{0: (0, fork // 2), 1: (1, 1)}, {0: (0, fork), 1: (1, 2)}]
    after: list[Plan] = [
        {0: (0, long - 4), 1: (1, 3), 2: (2, fork + 1), 3: (3, max(1, middle - 4))}
    ]
    for n in (1, 2, 3, 4):
        after.append(
            {0: (0, long - 4 + n), 1: (1, 3 + n), 2: (2, fork + 1 + n), 3: (3, middle - 4 + n)}
        )
    # Slot 1 is used again.
    after.append({1: (3, middle // 2)})
    after.append({1: (3, middle // 2 + 1)})
    return before, fork, after


class _Trial:
    """Runs steps and compares the log-probabilities after the last token of each sequence with
    those of the model alone.
    """

    def __init__(self, runner: AnyRunner, rows: Sequence[Row], expected: Sequence[Tensor]) -> None:
        self._runner = runner
        self._rows = rows
        self._expected = expected
        self._at: dict[int, tuple[int, int]] = {}
        """The row in each slot, and how many tokens of the row it has."""
        self.worst = 0.0

    def run(self, plan: Plan) -> None:
        parts: list[tuple[int, int, int, int]] = []
        # (count of tokens, slot, row, first token) of each sequence
        for slot, (row, asked) in plan.items():
            known, length = self._at.get(slot, (row, 0))
            start = length if known == row else 0
            end = min(asked, len(self._rows[row]))
            if end > start:
                self._at[slot] = row, end
                if self._runner.recomputes:
                    start = 0
                parts.append((end - start, slot, row, start))
        if not parts:
            return
        parts.sort(key=lambda part: (part[0] > 1, part[0], part[1]))
        brought: list[tuple[int, int, Row]] = []
        for count, slot, row, start in parts:
            brought.append((slot, start, self._rows[row][start : start + count]))
        logits = self._runner.forward(step_batch(brought))
        for found, (count, _, row, start) in zip(logits, parts, strict=True):
            expected = self._expected[row][start + count - 1].to(found.device)
            error = (found.float().log_softmax(-1) - expected).abs().max()
            self.worst = max(self.worst, float(error.nan_to_num(nan=torch.inf)))

    def copy(self, length: int) -> None:
        """Copies slot 0 to slot 2, which then runs row 2."""
        _copy(self._runner, length)
        self._at[2] = 2, length


def _copy(runner: KeepsSpans, length: int) -> None:
    runner.put(2, [(runner.take(0, start=0, end=length, at_end=True), length)])


def step_batch(parts: Sequence[tuple[int, int, Row]]) -> StepBatch:
    """A batch of slots, each with the place at which it goes on and the tokens that it brings, in
    the order that `StepBatch` asks for. The last token of each slot is wanted.
    """
    slots = np.array([slot for slot, _, _ in parts], dtype=np.int64)
    starts = np.array([start for _, start, _ in parts], dtype=np.int64)
    counts = np.array([len(tokens) for _, _, tokens in parts])
    places = [np.arange(start, start + len(tokens)) for _, start, tokens in parts]
    positions = np.concatenate(places)
    tokens = np.concatenate([tokens for _, _, tokens in parts])
    wanted = np.zeros(len(tokens), dtype=np.bool_)
    wanted[np.cumsum(counts) - 1] = True
    return StepBatch(slots, starts, counts, tokens, positions, np.repeat(slots, counts), wanted)


def _generation_error(
    model: PreTrainedModel, manner: Manner, rows: Sequence[Row], expected: Sequence[Tensor]
) -> float:
    """The worst difference in any log-probability after any token that a sequence may be continued
    from, in nats.
    """
    before, fork, after = _plan(rows)
    runner = _runner(model, manner, max_running=4, max_context=max(map(len, rows)))
    trial = _Trial(runner, rows, expected)
    for plan in before:
        trial.run(plan)
    trial.copy(fork)
    for plan in after:
        trial.run(plan)
    return trial.worst


def _with_scores(
    model: PreTrainedModel,
    manner: Manner,
    rows: Sequence[Row],
    expected: Sequence[Tensor],
    verdict: Proof,
) -> tuple[Manner, Proof]:
    """The manner completed by a way to score that is right."""
    targets: list[Tensor] = []
    for row, log in zip(rows, expected, strict=True):
        ids = torch.from_numpy(row[1:, None]).to(log.device)
        targets.append(log[:-1].gather(-1, ids)[:, 0].cpu())
    vocabulary = expected[0].shape[-1]
    worst = torch.inf
    for resumes in (True, False):
        try:
            scores = token_logprobs(
                model,
                [row.astype(np.int32) for row in rows],
                temperature=1.0,
                max_logits=len(rows) * vocabulary * 7,
                resumes=resumes,
            )
        except Exception:  # This is no way to score with the model.
            continue
        errors: list[float] = []
        for got, target in zip(scores, targets, strict=True):
            errors.append(float((torch.from_numpy(got[1:]) - target).abs().max()))
        worst = max(errors)
        if worst < TOLERANCE:
            error = max(worst, verdict.logprob_error or 0.0)
            return replace(manner, resumes=resumes), replace(verdict, logprob_error=error)
    return manner, replace(
        verdict,
        way=Way.REFUSED,
        logprob_error=worst,
        reason=f"its scores are {worst:.2g} nats off; set engine.kind to vllm or sglang.",
    )
