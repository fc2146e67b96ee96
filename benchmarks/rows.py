"""What a source of a million rows takes of a rollout process: `python rows.py [ROWS] [--format
jsonl|csv|parquet]`.

Memory is resident, of a process of its own that has imported what a rollout process does. Times are
seconds of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway_memory import resident_mb
from smoke import options_of

DRAWS = 10_000


def written(folder: Path, count: int, kind: str) -> Path:
    """About 200 bytes a row as JSON."""
    path = folder / f"rows.{kind}"
    rows = (
        {
            "question": f"Ann has {i} nuts and finds {i % 97} more. How many are they now?",
            "answer": i + i % 97,
            "notes": "n" * 80,
        }
        for i in range(count)
    )
    if kind == "parquet":
        from datasets import Dataset

        Dataset.from_list(list(rows)).to_parquet(path)
        return path
    with path.open("w") as file:
        if kind == "csv":
            file.write("question,answer,notes\n")
        file.writelines(
            ",".join(map(str, row.values())) + "\n" if kind == "csv" else json.dumps(row) + "\n"
            for row in rows
        )
    return path


def measured(path: Path, heldout: int) -> Iterator[tuple[str, float, float]]:
    """What is done, its seconds, and the resident megabytes after it."""
    # what such a process has in memory anyway
    import_module("midflight.run.rollout.rollout_process")
    from midflight.config.sources import SourceSection
    from midflight.environments.seeded_stream import SeededStream
    from midflight.environments.sources import load_sources
    from midflight.run.launcher.checks.tasks import LOOKING_SECONDS, look_at_rows

    yield "before", 0.0, resident_mb()
    section = SourceSection(path=path, answer="answer", heldout=heldout)
    began = time.process_time()
    sources = load_sources([section], seed=0)
    yield f"sources loaded, {heldout} held out", time.process_time() - began, resident_mb()
    began = time.process_time()
    stream = SeededStream(sources, seed=0)
    stream.next()
    yield "order of an epoch, first task", time.process_time() - began, resident_mb()
    began = time.process_time()
    drawn = [stream.next()[0] for _ in range(DRAWS)]
    yield f"{len(drawn):,} further tasks", time.process_time() - began, resident_mb()
    began = time.process_time()
    looked = look_at_rows(sources[0], section, needs_answer=True, seconds=LOOKING_SECONDS)
    total = len(sources[0].training) + len(sources[0].heldout)
    yield (
        "every row looked at, as before a run" + (" (not all)" if looked < total else ""),
        time.process_time() - began,
        resident_mb(),
    )


def told(path: Path, heldout: int) -> None:
    for what, seconds, memory in measured(path, heldout):
        print(f"| {what} | {seconds:.2f} s | {memory:.0f} MB |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--format", choices=("jsonl", "csv", "parquet"), default="jsonl")
    options = options_of(parser, rows=3000)
    with TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        path = written(Path(folder), options.rows, options.format)
        print(
            (
                f"{options.rows:,} rows, {path.stat().st_size / 2**20:.0f} MB of "
                f"{options.format}\n\n| "
                "after | CPU | resident |\n|---|---|---|"
            ),
            flush=True,
        )
        for heldout in (0, 256):
            process = multiprocessing.get_context("spawn").Process(
                target=told, args=(path, heldout)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
