"""From a session's tree to rows. Pure.

I3: every generated token is trained in exactly one row, or has exactly one reason why not. A leaf's path is a row; the first
leaf (in order of recording) that holds a token trains it, in later rows it is context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from midflight.gateway.tree import Node
from midflight.types import Reason, Row


@dataclass(frozen=True, slots=True, eq=False)
class Harvest:
    """Rows to train on, and the generated tokens that are not, by reason."""

    rows: tuple[Row, ...]
    masked: Counter[Reason] = field(default_factory=Counter[Reason])
    dropped: Counter[Reason] = field(default_factory=Counter[Reason])


def harvest(nodes: Sequence[Node]) -> Harvest:
    """`nodes` in order of recording. Paths without a trainable token give no row."""
    unchosen = _unchosen(nodes)
    result = Harvest(rows=_rows([node for node in nodes if node not in unchosen]))
    for node in nodes:
        if node in unchosen:
            result.dropped[Reason.UNCHOSEN] += len(node.turn.output_ids)
        elif not node.turn.policy_sampled:
            result.masked[Reason.NOT_POLICY_SAMPLED] += len(node.turn.output_ids)
        result.dropped[Reason.OVERSHOOT] += node.turn.num_overshoot
    return Harvest(result.rows, +result.masked, +result.dropped)


def _unchosen(nodes: Sequence[Node]) -> set[Node]:
    """Choices of an n > 1 request that the agent did not continue, where it continued another."""
    continued = {node.request for node in nodes if node.children}
    return {node for node in nodes if node.request in continued and not node.children}


def _rows(nodes: Sequence[Node]) -> tuple[Row, ...]:
    claimed: set[Node] = set()
    rows: list[Row] = []
    for leaf in nodes:
        if not leaf.children:
            path = _path(leaf)
            row = _row(leaf, path, trained=[node for node in path if node not in claimed and node.turn.policy_sampled])
            claimed.update(path)
            if row.num_trainable:
                rows.append(row)
    return tuple(rows)


def _path(leaf: Node) -> list[Node]:
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    return path


def _row(leaf: Node, path: Sequence[Node], *, trained: Sequence[Node]) -> Row:
    length = len(leaf.ids)
    row = Row(
        token_ids=np.asarray(leaf.ids, dtype=np.int32),
        generated=np.zeros(length, dtype=np.bool_),
        loss_mask=np.zeros(length, dtype=np.bool_),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        kv_versions=np.zeros(length, dtype=np.int32),
    )
    for node in path:
        _write(row, node, trained=node in trained)
    return row


def _write(row: Row, node: Node, *, trained: bool) -> None:
    turn, start = node.turn, len(node.turn.prompt_ids)
    span = slice(start, start + len(turn.output_ids))
    row.generated[span] = True
    row.loss_mask[span] = trained
    row.logprobs[span] = turn.logprobs
    for segment in turn.segments:
        row.versions[start + segment.start : start + segment.end] = segment.version
        row.kv_versions[start + segment.start : start + segment.end] = segment.kv_version
