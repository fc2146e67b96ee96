"""The generated part of docs/metrics.md: `python -m midflight.observe.reference
docs/metrics.md`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from midflight.observe import meanings

BEGIN = (
    "<!-- made by python -m midflight.observe.reference docs/metrics.md from "
    "src/midflight/observe/meanings.py: edit the sentences there -->"
)


def reference() -> str:
    """The generated part, as Markdown."""
    names = [(f"`{m.name}`", m.formula, m.unit, m.healthy) for m in meanings.MEANINGS]
    parts = [
        BEGIN,
        "## Names for dashboards",
        _table(("name", "formula", "unit", "healthy"), names),
        '## `metrics.jsonl`\n\n### `"kind": "step"`: one step of the trainer',
        _table(("key", "meaning"), meanings.STEP_KEYS),
        '### `"kind": "evaluation"`: one source of tasks in one evaluation',
        _table(("key", "meaning"), meanings.EVALUATION_KEYS),
        '### `"kind": "alarm"`: what somebody should look at',
        "`name`, `text`, and `step`, `version` and `seconds` of the moment. The terminal says the "
        "same, and repeats none within ten minutes; `unclaimed` comes again each time that its "
        "wait has doubled.",
        _table(("`name`", "said when"), meanings.ALARMS),
        "## `summary.json`",
        _table(("key", "meaning"), meanings.SUMMARY_KEYS),
        "## `/metrics`",
        (
            "While a run or `midflight serve` is up. Counters end in `_total`, histograms in "
            "`_bucket`, `_sum` and `_count`."
        ),
        _table(("name", "labels", "meaning"), meanings.METRICS),
        "An engine has a `/metrics` of its own: `midflight_engine_output_tokens`, "
        "`midflight_engine_computed_tokens` and `midflight_engine_reused_tokens` of the embedded "
        "engine, `midflight_engine_running_requests`, `midflight_engine_waiting_requests`, "
        "`midflight_engine_weight_version` and `midflight_engine_paused`.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_row(head), _row(["---"] * len(head))]
    for row in rows:
        escaped = [cell.replace("|", "\\|") for cell in row]
        lines.append(_row(escaped))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(page: str) -> str:
    """The part of a page before the generated one."""
    return page.partition(BEGIN.partition(" from ")[0])[0]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text()) + reference())
