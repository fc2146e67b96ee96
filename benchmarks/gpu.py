"""What a GPU does with a Qwen3 of 0.6 billion random weights: generation, a trainer's step, a
handover, and a whole run. Skipped, with a word, where torch sees none.

    python benchmarks/gpu.py [--only generation training handover ring] [--rounds 3]

Generation is of the embedded engine in bfloat16; *of a copy's bandwidth* is the share of it that
reading all weights once a step takes, so 1 is the floor of decoding. Training has weights in
float32 and computes in bfloat16. The handover is from the trainer's weights to the engine's, by
shared memory and as in a run. The ring is `midflight train` on the demo's tasks with engine and
trainer on GPUs of their own, or sharing the only one. Medians over rounds, after one that does not
count.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness.arguments import Arguments
from harness.models import GROUP, PROMPT, embedded_engine, made_groups, policy_trainer, requests
from harness.report import Report
from harness.ring import ring
from harness.rounds import timed
from harness.runs import DEMO, SMALL
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from midflight.config.load import load_config
from midflight.engines.embedded.weights import EngineWeights
from midflight.models.export import export_model
from midflight.models.load import load_model
from midflight.models.names import in_dtype, named_tensors
from midflight.text.byte_tokenizer import END, write_byte_tokenizer
from midflight.trainer.trainer import Scale
from midflight.weights.transports.select import publisher, receiver

PAD = 261
CONTEXT = 2048
Findings = Iterator[tuple[str, str]]


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--only", [*PARTS], choices=[*PARTS])
    arguments.option("--device", "cuda", smoke="cpu")
    arguments.option("--layers", 28, smoke=1)
    arguments.option("--vocabulary", 151_936, smoke=512)
    arguments.option("--running", [1, 8, 64], smoke=[2], help="requests that are decoded together")
    arguments.option("--tokens", 256, smoke=4, help="of each answer")
    arguments.option("--groups", 16, smoke=1, help="of a step")
    arguments.option("--steps", 30, smoke=3, help="of the ring, of which a third does not count")
    options = arguments.parse()
    uses_gpu = options.device.startswith("cuda")
    if uses_gpu and not torch.cuda.is_available():
        print(
            "skipped: torch sees no GPU here; with --smoke all of it runs on the CPU, in a small "
            "size"
        )
        return
    report = Report(options)
    name = torch.cuda.get_device_name() if uses_gpu else "the CPU"
    report.say(f"{name}, torch {torch.__version__}")
    table = report.table("what", "found")
    with tempfile.TemporaryDirectory() as scratch:
        folder = made(Path(scratch), options)
        for part in options.only:
            for what, found in PARTS[part](folder, options):
                table.row(what, found)
    report.close()


def made(scratch: Path, options: argparse.Namespace) -> Path:
    """The folder of a model of Qwen3-0.6B's shape; in the smoke form of fewer layers and words."""
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    if options.smoke:
        sizes = {name: max(2, size // 16) for name, size in sizes.items()}
    config = Qwen3Config(
        vocab_size=options.vocabulary,
        num_hidden_layers=options.layers,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        **sizes,  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    write_byte_tokenizer(scratch / "tokenizer")
    export_model(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        scratch / "tokenizer",
        scratch / "model",
    )
    return scratch / "model"


def seconds(deed: Callable[[], object], *, device: str, rounds: int) -> float:
    """Median, of a deed and of all that it has left to the device."""

    def complete() -> None:
        deed()
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    taken = [timed(complete)[1].wall for _ in range(rounds + 1)]
    return statistics.median(taken[1:])


def copy_bandwidth(device: str, *, num_bytes: int = 2**30) -> float:
    """Bytes that a copy within the device's memory reads and writes in a second."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device=device, rounds=10)


def generation(folder: Path, options: argparse.Namespace) -> Findings:
    model = load_model(folder, dtype="bfloat16", device=options.device)
    weights = sum(tensor.nbytes for tensor in named_tensors(model).values())
    bandwidth = copy_bandwidth(options.device)
    yield "a copy within the device's memory", f"{bandwidth / 1e12:.2f} TB/s, read and written"
    engine = embedded_engine(
        model, running=max(options.running), context=CONTEXT, max_batch_tokens=8192
    )
    for running in options.running:
        prompts = [range(number % 256, number % 256 + PROMPT) for number in range(running)]
        asked = requests(prompts, answer=options.tokens)
        taken = seconds(
            lambda asked=asked: engine.generate_all(asked),
            device=options.device,
            rounds=options.rounds,
        )
        floor = options.tokens * weights / bandwidth / taken
        rate = running * options.tokens / taken
        yield (
            f"decoding {running} together",
            f"{rate:,.0f} tokens/s, {floor:.3f} of a copy's bandwidth",
        )


def training(folder: Path, options: argparse.Namespace) -> Findings:
    scale = Scale(micro_batch_tokens=8192, compute_dtype=torch.bfloat16)
    model = load_model(folder, dtype="float32", device=options.device)
    trainer = policy_trainer(model, rate=1e-6, scale=scale)

    def step() -> None:
        trainer.step(made_groups(trainer.version, number=options.groups, answer=options.tokens))

    taken = seconds(step, device=options.device, rounds=options.rounds)
    trained = options.groups * GROUP * (PROMPT + options.tokens)
    yield (
        f"a step of {options.groups} groups of {GROUP}",
        f"{taken:.3f} s, {trained / taken:,.0f} tokens/s",
    )


def handover(folder: Path, options: argparse.Namespace) -> Findings:
    source: PreTrainedModel = load_model(folder, dtype="float32", device=options.device)
    served = load_model(folder, dtype="bfloat16", device=options.device)
    engine = EngineWeights(served, receiver(), version=0)
    found: dict[str, list[float]] = {"publish": [], "stage": [], "commit": []}
    sent = 0
    name = f"midflight-bench-gpu-{os.getpid()}"
    with publisher("shared_memory", name=name, folder=folder) as outbox:
        for version in range(1, options.rounds + 2):
            change(source)
            began = time.perf_counter()
            manifest = outbox.publish(version, in_dtype(named_tensors(source), torch.bfloat16))
            published = time.perf_counter()
            engine.stage(manifest)
            staged = time.perf_counter()
            engine.commit(version)
            committed = time.perf_counter()
            outbox.release(version - 1)
            found["publish"].append(published - began)
            found["stage"].append(staged - published)
            found["commit"].append(committed - staged)
            sent = sum(spec.num_bytes for spec in manifest.tensors)
    medians = [f"{what} {statistics.median(taken[1:]):.4f} s" for what, taken in found.items()]
    yield f"a version of {sent / 1e9:.2f} GB", ", ".join(medians)


def change(model: PreTrainedModel) -> None:
    """Changes all weights: a version that an engine serves already is not fetched."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def whole_ring(folder: Path, options: argparse.Namespace) -> Findings:
    shared = options.device.startswith("cuda") and torch.cuda.device_count() < 2
    settings = [
        f"model.path={folder}",
        f"model.max_context={CONTEXT if not options.smoke else 128}",
        "engine.dtype=bfloat16",
        f"engine.device={options.device}",
        f"trainer.device={options.device}",
        f"engine.share_devices={str(shared).lower()}",
        "trainer.compute_dtype=bfloat16",
        "warm_start.target_accuracy=none",
        f"run.steps={options.steps}",
        f"run.folder={folder.parent / 'run'}",
        f"run.name=gpu-{secrets.token_hex(4)}",
        "environment.workers=0",
    ]
    config = load_config(DEMO, [*SMALL, *settings] if options.smoke else settings)
    warmup = max(1, options.steps // 3)
    found = ring(config, warmup=warmup)
    staged, paused = found.handover
    where = ", engine and trainer on one GPU" if shared else ""
    yield (
        f"a run of {options.steps} steps{where}",
        f"{found.samples_per_second:.1f} rollouts/s, stage {staged:.3f} s, pause {paused:.4f} s",
    )


PARTS: dict[str, Callable[[Path, argparse.Namespace], Findings]] = {
    "generation": generation,
    "training": training,
    "handover": handover,
    "ring": whole_ring,
}


if __name__ == "__main__":
    main()
