"""Our side of a race of `training.py`, in a process of its own.

python -m sides.race PLAN OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.processes import held_mib
from harness.ring import train_watched

from midflight.config.sections import Config
from midflight.observe.history import read_journal


def main(plan: Path, out: Path) -> None:
    config = Config.model_validate_json((plan / "config.json").read_text())
    watch = train_watched(config, reads_memory=True)
    steps = read_journal(config.run.folder / "metrics.jsonl").steps
    rewards = [(step.trainer or {}).get("reward/mean") or 0.0 for step in steps]
    own = held_mib()
    found = {
        "seconds": watch.ended - watch.serving,
        "steps": len(rewards),
        "cpu": watch.cpu_seconds,
        "peak_mib": sum(watch.peaks.values()) + own,
        "peaks": watch.peaks | {"launcher": own},
        # it would have gone on otherwise
        "reached": len(rewards) < config.run.steps,
        "rewards": rewards,
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
