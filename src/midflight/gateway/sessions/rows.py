"""From a session's tree to rows. Pure.

I3: every generated token is trained in exactly one row, or has exactly one reason why not. A leaf's path is a row; the first
leaf (in order of recording) that holds a token trains it, in later rows it is context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from midflight.gateway.sessions.node import Node
from midflight.types import Reason, Row


@dataclass(frozen=True, slots=True, eq=False)
class Harvest:
    """Rows to train on, and the generated tokens that are not, by reason."""

    rows: tuple[Row, ...]
    masked: Counter[Reason] = field(default_factory=Counter[Reason])
    dropped: Counter[Reason] = field(default_factory=Counter[Reason])


def harvest(nodes: Sequence[Node], *, count_all_choices: bool = False) -> Harvest:
    """`nodes` in order of recording. Paths without a trainable token give no row.

    `count_all_choices`: choices that the agent did not continue are trained too, each as a row of its own (DECISIONS 12).
    """
    unchosen = set[Node]() if count_all_choices else _unchosen(nodes)
    result = Harvest(rows=_rows([node for node in nodes if node not in unchosen]))
    for node in nodes:
        if node in unchosen:
            result.dropped[Reason.UNCHOSEN] += node.num_output
        elif not node.policy_sampled:
            result.masked[Reason.NOT_POLICY_SAMPLED] += node.num_output
        result.dropped[Reason.OVERSHOOT] += node.num_overshoot
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
            path = leaf.path
            trained = {node for node in path if node not in claimed and node.policy_sampled and node.output}
            claimed.update(path)
            if trained:
                rows.append(_row(leaf, path, trained=trained))
    return tuple(rows)


def _row(leaf: Node, path: Sequence[Node], *, trained: Set[Node]) -> Row:
    length = leaf.end
    row = Row(
        token_ids=np.frombuffer(leaf.packed_ids, dtype="<i4").astype(np.int32),
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
    start = node.num_prompt
    span = slice(start, node.end)
    row.generated[span] = True
    row.loss_mask[span] = trained
    row.logprobs[span] = np.frombuffer(node.logprobs, dtype="<f4")
    for segment in node.segments:
        row.versions[start + segment.start : start + segment.end] = segment.version
        row.kv_versions[start + segment.start : start + segment.end] = segment.kv_version
