"""Names of kinds of values that every station uses, and the closed sets."""

from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Version: TypeAlias = int
"""The number of a published set of weights: 0, 1, 2, ... (not a step, not a checkpoint)."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Likely: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids that may stand at one place, each with its log-probability."""
Int32: TypeAlias = NDArray[np.int32]
UInt8: TypeAlias = NDArray[np.uint8]
Float32: TypeAlias = NDArray[np.float32]
Bool: TypeAlias = NDArray[np.bool_]


UNTRACKED = "untracked"
"""The part of a rollout whose tokens are neither recorded nor trained: judges, simulated users."""
PART = "~"
"""Between the token of a rollout's session and the name of another part of the same rollout."""


def part_of(token: str, name: str) -> str:
    """The token of another part of the rollout that a session's token is of."""
    return f"{token.partition(PART)[0]}{PART}{name}"


def parted(token: str) -> tuple[str, str]:
    """A token and the part that it names; the part is empty where it names none."""
    plain, _, name = token.partition(PART)
    return plain, name


class PauseMode(StrEnum):
    """What happens to requests in flight, and to their keys and values, while an engine is
    paused.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    ABORT = "abort"
    DRAIN = "drain"


class FinishReason(StrEnum):
    """Why a generation ended. `ABORT` is never shown to an agent: the gateway resumes such a
    request.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StalePolicy(StrEnum):
    """What is done with a group that is, or would become, older than `max_staleness`."""

    WAIT = "wait"
    DROP = "drop"
    MASK = "mask"
    REQUEUE = "requeue"


class LogprobKind(StrEnum):
    """Of which distribution an engine gives the log-probability of a sampled token. At temperature
    0 all give that of temperature 1.
    """

    SAMPLED = "sampled"
    """After temperature and every truncation, renormalised: exactly the distribution sampled
    from.
    """
    TEMPERATURE = "temperature"
    """softmax(logits / temperature), before truncation."""
    RAW = "raw"
    """softmax(logits)."""


class Feature(StrEnum):
    """Ways of sampling that not every engine has; the gateway refuses by name what no engine can
    do.
    """

    PENALTIES = "penalties"
    """`frequency_penalty`, `presence_penalty` and `repetition_penalty`."""
    LOGIT_BIAS = "logit_bias"
    TOP_LOGPROBS = "top_logprobs"
    GRAMMARS = "grammars"
    PROMPT_LOGPROBS = "prompt_logprobs"
    """It says how likely the tokens of a prompt are; see `ports.PromptScorer`."""
    SAMPLING_MASKS = "sampling_masks"
    """It says of each token what top-p, top-k and min-p kept, where it is asked to; see
    `types.kept`.
    """


class GrammarKind(StrEnum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema as JSON text; `{"type": "object"}` is any object."""
    REGEX = "regex"
    LARK = "lark"
    """llguidance's Lark dialect: `%json {...}` for embedded schemas, `<name>` or `<[id]>` for
    special tokens.
    """


class Kind(StrEnum):
    """What a rollout is for."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    """On a held-out task: no part of rewards and totals."""
    OUTSIDE = "outside"
    """Of a client with sessions of its own. The run neither stores it nor trains on it."""


class Fate(StrEnum):
    """What became of a token of an ended rollout (invariant I3): exactly one of these."""

    WAITING = "waiting"
    TRAINED = "trained"
    MASKED = "masked"
    DROPPED = "dropped"


class Reason(StrEnum):
    """Why a token was masked, or a token, rollout or group was dropped."""

    STALE = "stale"
    OVERSHOOT = "overshoot"
    UNCHOSEN = "unchosen"
    NOT_POLICY_SAMPLED = "not_policy_sampled"
    TRUNCATED = "truncated"
    """The rollout was cut short by a limit, and such are not trained on."""
    NO_REWARD = "no_reward"
    TOO_FEW = "too_few"
    ZERO_SPREAD = "zero_spread"
    REQUEUED = "requeued"
    NOT_FINITE = "not_finite"
    SKIPPED = "skipped"
    """The trainer made no update with it: its loss or gradient was not finite, or an alarm held the
    step back.
    """
    SHUTDOWN = "shutdown"
    ABANDONED = "abandoned"
    """The request was cancelled or failed before its answer was complete."""


def fill_unknown(record: UInt8, later: UInt8) -> None:
    """Of two records of experts [N, B] of the same tokens, the second one's where the first has
    none (255 in all bytes). In place.
    """
    unknown = (record == 255).all(1)
    record[unknown] = later[unknown]
