"""`--explain TOKEN`: everything that a step's loss did with one token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from midflight.errors import NoRun
from midflight.run.replay.step import ReplayedStep
from midflight.text.tokenizer import Tokenizer
from midflight.types import PackedBatch, Version


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A token of a batch: the number of the row, and the place of the token in the row."""

    row: int
    place: int


def place_of(text: str, batch: PackedBatch) -> TokenPlace:
    """The token that is named `ROW:PLACE`. Raises `NoRun` if the batch has none such."""
    row, colon, place = text.partition(":")
    if not colon or not row.isdecimal() or not place.isdecimal():
        raise NoRun(f"{text!r} names no token; it is ROW:PLACE, such as 0:17.")
    found = TokenPlace(int(row), int(place))
    num_rows = len(batch.row_rollout)
    if found.row >= num_rows:
        raise NoRun(f"the batch has {num_rows} rows, from 0 on, and no row {found.row}.")
    length = int(batch.row_offsets[found.row + 1] - batch.row_offsets[found.row])
    if found.place >= length:
        raise NoRun(f"row {found.row} has {length} tokens, from 0 on, and no token {found.place}.")
    return found


def explain(
    replayed: ReplayedStep, token: TokenPlace, tokenizer: Tokenizer | None
) -> Iterator[tuple[str, str]]:
    """Yields name and value of everything about a token, in the order in which a loss makes it."""
    batch = replayed.batch
    at = int(batch.row_offsets[token.row]) + token.place
    rollout = int(batch.row_rollout[token.row])
    yield "token", _named(int(batch.token_ids[at]), tokenizer)
    yield "rollout", f"{rollout} of group {int(batch.rollout_group[rollout])} in the batch"
    yield "reward of its rollout", f"{float(batch.rewards[rollout]):g}"
    if not batch.loss_mask[at]:
        yield "in the loss", "no: it is context, or it was masked before the step"
        return
    yield "version", _version(batch, at)
    found = np.flatnonzero(replayed.watch.places(batch) == at)
    if not len(found):
        yield (
            "in the loss",
            "no: it has no log-probability, no reward, or its rollout was cut short",
        )
        return
    yield from _in_the_loss(replayed, int(found[0]))


def _in_the_loss(replayed: ReplayedStep, number: int) -> Iterator[tuple[str, str]]:
    """Yields the values of a token of the loss."""
    tokens = replayed.watch.tokens
    proximal, policy, weight, below, above, *masked = replayed.watch.record.readings[
        :, number
    ].tolist()
    behaviour = float(tokens.behaviour[number])
    yield "age", f"{int(tokens.age[number])} versions"
    yield "log-probability when sampled", f"{behaviour:.6f}"
    yield "log-probability at the step's begin", f"{proximal:.6f}"
    yield "log-probability in the update", f"{policy:.6f}"
    yield "ratio to the proximal policy", f"{np.exp(policy - proximal):.6f}"
    yield "ratio to the policy that sampled", f"{np.exp(policy - behaviour):.6f}"
    yield "weight of the correction", f"{weight:.6f}"
    names = [name for name, gone in zip(replayed.watch.record.masks, masked, strict=True) if gone]
    yield "taken out by", ", ".join(names) or "nothing"
    clipped = "no"
    if above:
        clipped = "above"
    if below:
        clipped = "below"
    yield "clipped", clipped
    yield "advantage", f"{float(tokens.advantage[number]):.6f}"
    yield (
        "derivative of the loss by its log-probability",
        f"{float(replayed.watch.witness[number]):.3e}",
    )


def _named(token_id: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return str(token_id)
    return f"{token_id} {tokenizer.decode((token_id,))!r}"


def _version(batch: PackedBatch, at: int) -> str:
    version: Version = int(batch.versions[at])
    keys = int(batch.kv_versions[at])
    return f"{version}" if keys == version else f"{version}, over keys of version {keys} and later"
