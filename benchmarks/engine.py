"""Output tokens per second of the embedded engine, beside a bare `transformers` loop in the same run.

The bare loop decodes a batch of equally long prompts with a `DynamicCache`: no scheduler, no ragged lengths, plain
multinomial sampling, and it waits for the whole batch. Run with OMP_NUM_THREADS=1 to compare single cores.
"""

from __future__ import annotations

import argparse
import time

import torch
from smoke import options_of
from transformers import DynamicCache, PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.models.load import make_model
from midflight.text.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.types import GenerateRequest, SamplingParams, WeightManifest
from midflight.types.facts import unheard


class NoWeights:
    def fetch(self, manifest: WeightManifest) -> dict[str, memoryview]:
        raise NotImplementedError


def model() -> PreTrainedModel:
    return make_model(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=2,
        max_context=256, seed=0, dtype="float32",
    )  # fmt: skip


def prompts(num: int, *, group: int, length: int) -> list[tuple[int, ...]]:
    """`num` prompts, each asked `group` times in a row."""
    draw = torch.Generator().manual_seed(0)
    distinct = torch.randint(0, 256, ((num + group - 1) // group, length), generator=draw).tolist()
    return [tuple(distinct[i // group]) for i in range(num)]


def engine_rate(engine: EmbeddedEngine, asked: list[tuple[int, ...]], *, answer: int, seconds: float) -> float:
    requests = [
        GenerateRequest(str(i), ids, len(ids), SamplingParams(max_tokens=answer, ignore_eos=True, seed=i)) for i, ids in enumerate(asked)
    ]
    engine.generate_all(requests[:8])
    tokens, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        tokens += sum(len(g.token_ids) for g in engine.generate_all(requests))
    return tokens / (time.perf_counter() - started)


@torch.inference_mode()
def bare_rate(plain: PreTrainedModel, asked: list[tuple[int, ...]], *, answer: int, batch: int, seconds: float) -> float:
    tokens, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for first in range(0, len(asked), batch):
            ids, cache = torch.tensor(asked[first : first + batch]), DynamicCache()
            for _ in range(answer):
                logits = plain(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
                ids = torch.multinomial(torch.softmax(logits, -1), 1)
                tokens += len(ids)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=13)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="how often each prompt is asked")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each measurement")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 64], help="requests that are decoded together")
    options = options_of(parser, seconds=0.05, running=[1, 8])
    torch.set_num_threads(1)
    tokenizer = Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset({END}))
    print(f"{'running':>8} {'engine tok/s':>13} {'bare tok/s':>11} {'ratio':>6}")
    for running in options.running:
        asked = prompts(2 * running, group=options.group, length=options.prompt)
        engine = EmbeddedEngine(
            model(), tokenizer=tokenizer, name="bench", receiver=NoWeights(), record=unheard,
            max_running=running, max_batch_tokens=2048, max_context=256, pause_lease_seconds=30,
        )  # fmt: skip
        ours = engine_rate(engine, asked, answer=options.answer, seconds=options.seconds)
        bare = bare_rate(model(), asked, answer=options.answer, batch=running, seconds=options.seconds)
        print(f"{running:>8} {ours:>13.0f} {bare:>11.0f} {ours / bare:>6.2f}")


if __name__ == "__main__":
    main()
