"""The vocabulary of all stations: names of types, and the enumerations."""

from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Version: TypeAlias = int
"""The number of a published set of weights: 0, 1, 2, ... (not a step, not a checkpoint)."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Likely: TypeAlias = tuple[tuple[int, float], ...]
"""The token ids that may be at one place, each with its log-probability."""
Int32: TypeAlias = NDArray[np.int32]
UInt8: TypeAlias = NDArray[np.uint8]
Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]


UNTRACKED = "untracked"
"""The part of a rollout whose tokens are neither recorded nor trained: judges, simulated users."""
PART = "~"
"""The separator between the token of a rollout's session and the name of another part of the same
rollout.
"""


def part_of(token: str, name: str) -> str:
    """The token of another part of the same rollout, from the token of its session."""
    return f"{token.partition(PART)[0]}{PART}{name}"


def parted(token: str) -> tuple[str, str]:
    """Splits a token into the session's token and the name of the part. The name is empty if the
    token names no part.
    """
    plain, _, name = token.partition(PART)
    return plain, name


class MemoryPart(StrEnum):
    """A part of an engine's memory on its device, which wakes by itself."""

    WEIGHTS = "weights"
    KEYS = "keys"


class PauseMode(StrEnum):
    """The effect of a pause on requests in flight, and on their keys and values."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"
    DRAIN = "drain"


class FinishReason(StrEnum):
    """The reason for which a generation ended. `ABORT` is never shown to an agent: the gateway
    resumes such a request.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StalePolicy(StrEnum):
    """The treatment of a group that is, or would become, older than `max_staleness`."""

    WAIT = "wait"
    DROP = "drop"
    MASK = "mask"
    REQUEUE = "requeue"


class LogprobKind(StrEnum):
    """The distribution from which an engine takes the log-probability of a sampled token. At
    temperature 0 all engines give that of temperature 1.
    """

    SAMPLED = "sampled"
    """The distribution after temperature and every truncation, renormalised. It is exactly the one
    that was sampled from.
    """
    TEMPERATURE = "temperature"
    """softmax(logits / temperature), before truncation."""
    RAW = "raw"
    """softmax(logits)."""


class Feature(StrEnum):
    """Features of sampling that not every engine has. The gateway refuses parameters by name if no
    engine has the feature.
    """

    PENALTIES = "penalties"
    """`frequency_penalty`, `presence_penalty` and `repetition_penalty`."""
    LOGIT_BIAS = "logit_bias"
    TOP_LOGPROBS = "top_logprobs"
    GRAMMARS = "grammars"
    PROMPT_LOGPROBS = "prompt_logprobs"
    """The engine reports how likely the tokens of a prompt are; see `ports.PromptScorer`."""
    SAMPLING_MASKS = "sampling_masks"
    """The engine can report for each token the ids that top-p, top-k and min-p kept; see
    `types.sampling_masks`.
    """


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema as JSON text; `{"type": "object"}` is any object."""
    REGEX = "regex"
    LARK = "lark"
    """llguidance's Lark dialect: `%json {...}` for embedded schemas, `<name>` or `<[id]>` for
    special tokens.
    """


class Kind(StrEnum):
    """The purpose of a rollout."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    """The rollout of a held-out task. It is no part of rewards and totals."""
    OUTSIDE = "outside"
    """The rollout of a client with sessions of its own. The run neither stores it nor trains on
    it.
    """


class Fate(StrEnum):
    """The fate of a token of an ended rollout. Every token has exactly one (I3)."""

    WAITING = "waiting"
    TRAINED = "trained"
    MASKED = "masked"
    DROPPED = "dropped"


class Reason(StrEnum):
    """The reason why a token was masked, or a token, rollout or group was dropped."""

    STALE = "stale"
    OVERSHOOT = "overshoot"
    UNCHOSEN = "unchosen"
    NOT_POLICY_SAMPLED = "not_policy_sampled"
    TRUNCATED = "truncated"
    """The rollout was cut short by a limit, and the run does not train on such rollouts."""
    NO_REWARD = "no_reward"
    TOO_FEW = "too_few"
    ZERO_SPREAD = "zero_spread"
    REQUEUED = "requeued"
    NOT_FINITE = "not_finite"
    SKIPPED = "skipped"
    """The trainer made no update with it, because its loss or gradient was not finite or an alarm
    stopped the step.
    """
    SHUTDOWN = "shutdown"
    ABANDONED = "abandoned"
    """The request was cancelled or failed before its answer was complete."""
    DAMAGED = "damaged"
    """The disk gave other bytes back than were written, so that the group began again."""


def fill_unknown(record: UInt8, later: UInt8) -> None:
    """Fills gaps in a record of experts [N, B], in place. Tokens without a record (255 in all
    bytes) get that of `later`, a second record of the same tokens.
    """
    unknown = (record == 255).all(1)
    record[unknown] = later[unknown]
