"""What routing replay does to a mixture of experts whose engine computes in half precision: how far
trainer and engine differ on the same weights.

A small Qwen3-MoE is trained on the bytes of this repository's sources. The embedded engine samples
with it in bfloat16; the trainer computes the same tokens in float32 under the same weights, with
the experts that the engine recorded and with its own. Then the same in float32.

    python benchmarks/routing.py [--steps 300] [--answers 64] [--tokens 128]

| column | means |
|---|---|
| other experts | share of (token, layer) for which the trainer, left alone, chooses another set than the engine |
| mean, max, k3 | of the difference of log-probabilities of sampled tokens, in nats; k3 estimates the divergence per token |
| bytes | of a token's record |
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from delta import PRETRAIN_RATE, batches, train
from smoke import options_of
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.models.names import assign, in_dtype, named_tensors
from midflight.models.routing import Routers
from midflight.text.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.formulas.diagnostics import k3
from midflight.trainer.model.microbatch import Predictions, predictions_of, split
from midflight.trainer.model.policy import Policy
from midflight.types import GenerateRequest, SamplingParams, UInt8
from midflight.types.facts import unheard
from midflight.weights.transports.select import receiver

CONTEXT = 512
PROMPT_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of training before")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    options = options_of(parser, steps=2, answers=8, tokens=8)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = new_model()
    data = batches()
    loss = train(model, data, rate=PRETRAIN_RATE, steps=options.steps)[-1]
    weights = in_dtype(named_tensors(model), torch.bfloat16)
    prompts = [
        row[:PROMPT_TOKENS] for _ in range(-(-options.answers // 8)) for row in next(data).tolist()
    ][: options.answers]
    print(
        f"loss {loss:.2f} nats per byte after {options.steps} steps; 32 experts in each of 4 "
        "layers, 4 for each token\n"
    )
    print(
        "| engine | replay | other experts | mean | max | k3 | bytes | seconds "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for dtype in (torch.bfloat16, torch.float32):
        sampled = answered(of_weights(weights, dtype), prompts, num_tokens=options.tokens)
        for replays in (False, True):
            report(
                sampled,
                Policy(of_weights(weights, torch.float32), replays=True),
                replays=replays,
                engine=str(dtype),
            )


def new_model() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_experts=32,
            num_experts_per_tok=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            norm_topk_prob=True,
        )
    ).eval()


def of_weights(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Rounded to bfloat16 in either precision: trainer and engine have the same weights."""
    model = new_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    assign(model, {name: tensor.clone() for name, tensor in weights.items()})
    return model


@dataclass
class Sampled:
    """Answers as rows, one after the other."""

    predictions: Predictions
    logprobs: torch.Tensor
    """Of the engine, one for each prediction."""


def answered(model: PreTrainedModel, prompts: list[list[int]], *, num_tokens: int) -> Sampled:
    engine = EmbeddedEngine(
        model,
        tokenizer=Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset({END})),
        name="routing",
        receiver=receiver(),
        record=unheard,
        max_running=32,
        max_batch_tokens=2048,
        max_context=CONTEXT,
        pause_lease_seconds=60,
        records_experts=True,
    )
    sampling = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
        for seed in range(len(prompts))
    ]
    requests = [
        GenerateRequest(str(n), tuple(p), len(p), s)
        for n, (p, s) in enumerate(zip(prompts, sampling, strict=True))
    ]
    answers = engine.generate_all(requests)
    rows = [(*prompt, *answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    records = [
        np.frombuffer(answer.experts, np.uint8).reshape(len(row), -1)
        for answer, row in zip(answers, rows, strict=True)
    ]
    mask = np.concatenate([np.arange(len(row)) >= PROMPT_TOKENS for row in rows])
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    predictions = predictions_of(
        np.concatenate(rows).astype(np.int32), offsets, mask=mask, experts=np.concatenate(records)
    )
    return Sampled(
        predictions, torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    )


def report(sampled: Sampled, policy: Policy, *, replays: bool, engine: str) -> None:
    found = torch.zeros(len(sampled.logprobs))
    others = list[float]()
    began = time.perf_counter()
    routers = policy.routers
    record = sampled.predictions.experts
    assert routers is not None and record is not None
    for micro in split(
        sampled.predictions, np.arange(len(found)), budget=4096, device=torch.device("cpu")
    ):
        given = micro.experts
        micro = micro if replays else replace(micro, experts=None)
        with torch.no_grad(), routers.recording() as chosen:
            found[micro.predictions] = policy(micro, temperature=1.0)[0]
        others.append(different(routers, routers.packed(chosen), given))
    log_rho = found - sampled.logprobs
    numbers = f"{log_rho.abs().mean():.2e} | {log_rho.abs().max():.2e} | {k3(log_rho):.2e}"
    seconds = time.perf_counter() - began
    print(
        (
            f"| {engine} | {'yes' if replays else 'no'} | {np.mean(others):.2%} | {numbers} | "
            f"{record.shape[1]} | {seconds:.1f} |"
        ),
        flush=True,
    )


def different(routers: Routers, ours: UInt8, theirs: UInt8 | None) -> float:
    """Share of (token, layer) whose sets differ."""
    assert theirs is not None
    a, b = (np.sort(routers.unpacked(record), -1) for record in (ours, theirs))
    return float((a != b).any(-1)[:, (theirs != 255).any(1)].mean())


if __name__ == "__main__":
    main()
