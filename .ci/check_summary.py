"""Checks what a short demo run left behind: the files, the keys of summary.json, and that nothing failed."""

import json
import sys
from pathlib import Path

KEYS = {
    "heldout_before", "heldout_after", "seconds", "peak_memory_mb", "weight_updates", "rollouts_spanning_versions",
    "failed_requests", "trained_tokens", "max_token_staleness", "overlap_share",
}  # fmt: skip
FILES = [
    "metrics.jsonl",
    "plot.png",
    "model/config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
]


def main(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= KEYS, f"summary.json lacks {KEYS - summary.keys()}"
    assert summary["failed_requests"] == 0, summary
    assert summary["weight_updates"] >= 20, summary
    assert summary["rollouts_spanning_versions"] > 0, summary
    assert summary["max_token_staleness"] <= 4, summary
    missing = [name for name in FILES if not (folder / name).exists()]
    assert not missing, f"missing in {folder}: {missing}"
    sys.stdout.write(f"{folder}: {summary}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
