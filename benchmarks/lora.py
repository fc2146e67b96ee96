"""What a version weighs and costs when adapters are handed over and when all weights are: from the
trainer's copy to the engine's.

python benchmarks/lora.py [--versions 9]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from smoke import options_of
from transformers import PreTrainedModel

from midflight.engines.embedded.weights import EngineWeights
from midflight.models.creation import make_model
from midflight.models.load import load_model, save_model
from midflight.models.lora import add_adapters, lora_config
from midflight.models.names import named_tensors
from midflight.weights.transports.select import publisher, receiver

RANKS = (None, 64, 16, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--versions", type=int, default=9, help="versions handed over in each row; medians are told"
    )
    options = options_of(parser, versions=2)
    print("| trained | numbers | bytes a version | share | publish s | stage s |")
    print("|---|---|---|---|---|---|")
    whole = 0
    for rank in RANKS:
        model = make_model(
            vocab_size=16384,
            hidden_size=512,
            intermediate_size=1536,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            max_context=256,
            seed=0,
            dtype="float32",
        )
        if rank is not None:
            add_adapters(model, lora_config(model, rank=rank, alpha=2 * rank), seed=0)
        sent, seconds = handed_over(model, versions=options.versions)
        whole = whole or sent
        trained = "all weights" if rank is None else f"rank {rank}"
        parameters = sum(tensor.numel() for tensor in named_tensors(model).values())
        times = " | ".join(f"{statistics.median(taken):.3f}" for taken in seconds)
        print(
            f"| {trained} | {parameters:,} | {sent:,} | {sent / whole:.3f} | {times} |", flush=True
        )


def handed_over(
    model: PreTrainedModel, *, versions: int
) -> tuple[int, tuple[list[float], list[float]]]:
    """Bytes of a version; seconds to publish and to stage each one, by shared memory."""
    seconds: tuple[list[float], list[float]] = ([], [])
    sent = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        publisher("shared_memory", name="midflight-bench-lora", folder=Path(folder)) as outbox,
    ):
        save_model(model, Path(folder) / "start")
        engine = EngineWeights(
            load_model(Path(folder) / "start", dtype="float32"), receiver(), version=0
        )
        for version in range(1, versions + 1):
            for tensor in named_tensors(model).values():
                tensor += 1e-3
            marks = [time.perf_counter()]
            manifest = outbox.publish(version, named_tensors(model))
            marks.append(time.perf_counter())
            engine.stage(manifest)
            marks.append(time.perf_counter())
            engine.commit(version)
            if version > 1:
                outbox.release(version - 1)
            sent = sum(spec.num_bytes for spec in manifest.tensors)
            for taken, start, end in zip(seconds, marks, marks[1:], strict=False):
                taken.append(end - start)
    return sent, seconds


if __name__ == "__main__":
    main()
