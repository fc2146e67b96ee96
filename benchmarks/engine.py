"""Output tokens per second of the embedded engine's decoding, and what of the floor of its matrix
products that is.

    python benchmarks/engine.py [--threads 1 2] [--rounds 5] [--vllm-python .venv-vllm/bin/python]

Every side generates the same number of tokens for the same prompts, one round after the other, in
one process (vLLM in its own):

| side | what it is |
|---|---|
| modules | the engine over the modules of `transformers`, as for most architectures |
| plain | the engine as it serves this model: `PlainRunner` |
| bare | `transformers` in a loop over a `DynamicCache`: equal lengths, plain multinomial sampling, no scheduler |
| prototype | a decode step by hand over static keys: equal lengths, plain multinomial sampling, no scheduler |
| products | the matrix products of a step and nothing else: the floor |
| vllm | vLLM's own `LLM.generate`, compiled, without HTTP |

Rates are of wall time and, for those of this process, of its CPU time, which says more on a busy
machine with one thread. The table has medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from smoke import options_of
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.models import plain
from midflight.models.caches import cache_name
from midflight.models.creation import make_model
from midflight.text.byte_tokenizer import END, VOCAB_SIZE, byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.types import GenerateRequest, SamplingParams, WeightManifest
from midflight.types.facts import unheard

CONTEXT = 256
Prompts = list[tuple[int, ...]]
Side = Callable[[Prompts, int], int]
"""Generates so many tokens for each prompt, and returns how many those are."""


class NoWeights:
    def fetch(self, manifest: WeightManifest) -> dict[str, memoryview]:
        raise NotImplementedError


def model(hidden: int) -> PreTrainedModel:
    """3.2 million parameters with 256."""
    return make_model(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        max_context=CONTEXT,
        seed=0,
        dtype="float32",
    )


def prompts(num: int, *, length: int) -> Prompts:
    draw = torch.Generator().manual_seed(0)
    return [tuple(row) for row in torch.randint(0, 256, (num, length), generator=draw).tolist()]


def engine(hidden: int, *, running: int, modules: bool) -> Side:
    with patch.object(plain, "FAMILIES", frozenset[str]() if modules else plain.FAMILIES):
        served = EmbeddedEngine(
            model(hidden),
            tokenizer=Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset({END})),
            name="bench",
            receiver=NoWeights(),
            record=unheard,
            max_running=running,
            max_batch_tokens=4096,
            max_context=CONTEXT,
            pause_lease_seconds=30,
        )

    def side(asked: Prompts, answer: int) -> int:
        sampling = [
            SamplingParams(max_tokens=answer, ignore_eos=True, seed=i) for i in range(len(asked))
        ]
        requests = [
            GenerateRequest(str(i), ids, len(ids), s)
            for i, (ids, s) in enumerate(zip(asked, sampling, strict=True))
        ]
        return sum(len(each.token_ids) for each in served.generate_all(requests))

    return side


def bare(hidden: int) -> Side:
    own = model(hidden)
    name = cache_name(own)
    assert name is not None

    @torch.inference_mode()
    def side(asked: Prompts, answer: int) -> int:
        ids = torch.tensor(asked)
        cache = DynamicCache()
        for _ in range(answer):
            logits = own(input_ids=ids, **{name: cache}, use_cache=True, logits_to_keep=1).logits[
                :, -1
            ]
            ids = torch.multinomial(torch.softmax(logits, -1), 1)
        return answer * len(asked)

    return side


class Prototype:
    """Qwen3 by hand: keys and values [layers, n, kv_heads, context, head_dim], every sequence at
    the same position.
    """

    def __init__(self, hidden: int) -> None:
        self.own = model(hidden)
        self.name = cache_name(self.own) or ""
        self.config = self.own.config
        self.decoder = self.own.model
        self.layers = [
            (
                torch.cat(
                    [
                        layer.self_attn.q_proj.weight,
                        layer.self_attn.k_proj.weight,
                        layer.self_attn.v_proj.weight,
                    ]
                ).detach(),
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).detach(),
                layer,
            )
            for layer in self.decoder.layers
        ]
        cos, sin = self.decoder.rotary_emb(torch.empty(0), torch.arange(CONTEXT)[None])
        self.turns = cos[0].detach(), sin[0].detach()

    @torch.inference_mode()
    def __call__(self, asked: Prompts, answer: int) -> int:
        c = self.config
        num = len(asked)
        cache = DynamicCache()
        shape = (c.num_hidden_layers, num, c.num_key_value_heads, CONTEXT, c.head_dim)
        keys = torch.zeros(shape)
        values = torch.zeros(shape)
        logits = self.own(
            input_ids=torch.tensor(asked), **{self.name: cache}, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        layers: Any = cache.layers  # of the kind that keeps keys
        for number, layer in enumerate(layers):
            keys[number, :, :, : len(asked[0])] = layer.keys
            values[number, :, :, : len(asked[0])] = layer.values
        for place in range(len(asked[0]), len(asked[0]) + answer):
            ids = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0]
            if place + 1 < len(asked[0]) + answer:
                logits = self.step(ids, place, keys, values)
        return answer * num

    def step(self, ids: Tensor, place: int, keys: Tensor, values: Tensor) -> Tensor:
        c = self.config
        x = embedding(ids, self.decoder.embed_tokens.weight)
        heads = c.num_attention_heads
        kv_heads = c.num_key_value_heads
        size = c.head_dim
        eps = c.rms_norm_eps
        cos, sin = (turn[place] for turn in self.turns)
        for number, (qkv, gate_up, layer) in enumerate(self.layers):
            h = linear(rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, eps), qkv).view(
                len(ids), -1, size
            )
            q = rms_norm(h[:, :heads], (size,), layer.self_attn.q_norm.weight, eps)
            k = rms_norm(
                h[:, heads : heads + kv_heads], (size,), layer.self_attn.k_norm.weight, eps
            )
            qk = torch.cat([q, k], 1)
            turned = torch.cat([-qk[..., size // 2 :], qk[..., : size // 2]], -1)
            qk = qk * cos + turned * sin
            keys[number, :, :, place] = qk[:, heads:]
            values[number, :, :, place] = h[:, heads + kv_heads :]
            grouped = qk[:, :heads].reshape(len(ids), kv_heads, -1, size)
            out = scaled_dot_product_attention(
                grouped, keys[number, :, :, : place + 1], values[number, :, :, : place + 1]
            )
            x = x + linear(out.reshape(len(ids), -1), layer.self_attn.o_proj.weight)
            gate, up = linear(
                rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, eps), gate_up
            ).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.mlp.down_proj.weight)
        return linear(
            rms_norm(x, x.shape[-1:], self.decoder.norm.weight, eps),
            self.decoder.embed_tokens.weight,
        )


def products(hidden: int) -> Side:
    parts = Prototype(hidden)
    weights = [
        [qkv, layer.self_attn.o_proj.weight, gate_up, layer.mlp.down_proj.weight]
        for qkv, gate_up, layer in parts.layers
    ]
    weights.append([parts.decoder.embed_tokens.weight])

    @torch.inference_mode()
    def side(asked: Prompts, answer: int) -> int:
        inputs = {
            size: torch.ones(len(asked), size)
            for size in {weight.shape[1] for layer in weights for weight in layer}
        }
        for _ in range(answer):
            for layer in weights:
                for weight in layer:
                    linear(inputs[weight.shape[1]], weight)
        return answer * len(asked)

    return side


# --- vLLM, in an interpreter of its own -----------------------------------------------------------

VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, running, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", max_num_seqs=running, max_model_len=context, seed=0, enable_prefix_caching=False)
print("READY", flush=True)
for line in sys.stdin:
    asked, answer = json.loads(line)
    sampling = SamplingParams(max_tokens=answer, min_tokens=answer, temperature=1.0, detokenize=False)
    found = llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    print("TOKENS", sum(len(each.outputs[0].token_ids) for each in found), flush=True)
"""


class Vllm:
    def __init__(
        self, python: Path, hidden: int, *, running: int, threads: int, stack: ExitStack
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-"))
        model(hidden).save_pretrained(folder)
        environ = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{python.parent}:/usr/bin:/bin",
        }
        command = [str(python), "-c", VLLM, folder, str(running), str(CONTEXT)]
        log = stack.enter_context((Path(folder) / "log").open("w"))
        self._log = Path(folder) / "log"
        self._child = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
                cwd=folder,
            )
        )
        stack.callback(self._end)
        self._await("READY")

    def __call__(self, asked: Prompts, answer: int) -> int:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([asked, answer]) + "\n")
        self._child.stdin.flush()
        return int(self._await("TOKENS"))

    def _end(self) -> None:
        """With what it has started, which would outlive it."""
        family = psutil.Process(self._child.pid).children(recursive=True)
        for each in (self._child, *family):
            each.kill()

    def _await(self, word: str) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise SystemExit(f"vLLM ended: {self._log.read_text()[-2000:]}")


# --- The table ------------------------------------------------------------------------------------


def rates(
    sides: dict[str, Side], asked: Prompts, *, answer: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Of each side tokens per second of wall time and of this process's CPU time: medians of
    alternating rounds.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for side in sides.values():
        side(asked, 4)
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            wall = time.perf_counter()
            cpu = time.process_time()
            tokens = sides[name](asked, answer)
            found[name].append(
                (
                    tokens / (time.perf_counter() - wall),
                    tokens / max(time.process_time() - cpu, 1e-9),
                )
            )
    return {
        name: (statistics.median(w for w, _ in pairs), statistics.median(c for _, c in pairs))
        for name, pairs in found.items()
    }


COMPARED = ("modules", "bare", "prototype", "products", "vllm")
"""What `plain` is divided by."""


def line(running: int, threads: int, found: dict[str, tuple[float, float]]) -> str:
    cells = [
        f"{wall:,.0f}" if name == "vllm" else f"{wall:,.0f} ({cpu:,.0f})"
        for name, (wall, cpu) in found.items()
    ]
    cells += [f"{found['plain'][0] / found[name][0]:.2f}" for name in COMPARED if name in found]
    return f"| {running} | {threads} | {' | '.join(cells)} |"


def made(
    options: argparse.Namespace, *, running: int, threads: int, stack: ExitStack
) -> dict[str, Side]:
    hidden: int = options.hidden
    makers: dict[str, Callable[[], Side]] = {
        "modules": lambda: engine(hidden, running=running, modules=True),
        "plain": lambda: engine(hidden, running=running, modules=False),
        "bare": lambda: bare(hidden),
        "prototype": lambda: Prototype(hidden),
        "products": lambda: products(hidden),
        "vllm": lambda: Vllm(
            options.vllm_python.absolute(), hidden, running=running, threads=threads, stack=stack
        ),
    }
    return {name: make() for name, make in makers.items() if name in options.sides}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--running",
        type=int,
        nargs="+",
        default=[1, 8, 32, 64],
        help="requests that are decoded together",
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sides",
        nargs="+",
        default=["modules", "plain", "bare", "prototype", "products"],
        help="`plain` among them",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        help="interpreter of an environment with vLLM, which is one more side",
    )
    options = options_of(parser, running=[1, 8], threads=[1], answer=8, hidden=64, rounds=1)
    options.sides += ["vllm"] if options.vllm_python else []
    headings = [
        "requests",
        "threads",
        *options.sides,
        *(f"plain / {name}" for name in COMPARED if name in options.sides),
    ]
    print(
        f"tokens/s of wall time (of CPU time)\n\n| {' | '.join(headings)} "
        f"|\n{'|---' * len(headings)}|"
    )
    for threads in options.threads:
        torch.set_num_threads(threads)
        for running in options.running:
            with ExitStack() as stack:
                sides = made(options, running=running, threads=threads, stack=stack)
                asked = prompts(running, length=options.prompt)
                print(
                    line(
                        running,
                        threads,
                        rates(sides, asked, answer=options.answer, rounds=options.rounds),
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
