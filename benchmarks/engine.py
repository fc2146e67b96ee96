"""Output tokens per second of the embedded engine.

    python benchmarks/engine.py [--threads 1 2] [--rounds 5] [--vllm-python .venv-vllm/bin/python]
    python benchmarks/engine.py --parts prefixes guesses

**decoding**: every side generates the same number of tokens for the same prompts, in one process
(vLLM in its own).

| side | what it is |
|---|---|
| modules | the engine over the modules of `transformers`, as for most architectures |
| plain | the engine as it serves this model: `PlainRunner` |
| bare | `transformers` in a loop over a `DynamicCache`: equal lengths, plain multinomial sampling, no scheduler |
| products | the matrix products of a step and nothing else: the floor |
| vllm | vLLM's own `LLM.generate`, compiled, without HTTP |

Rates are of wall time and, for the sides of this process, of its CPU time, which says more on a
busy machine with one thread.

**prefixes**: the engine beside itself without kept keys (`engine.prefix_mb = 0`), in CPU seconds.
In `turns` each turn of a conversation begins with all turns before it. In `short` no two prompts
begin alike, so nothing is found.

**guesses**: the engine beside itself without `engine.guesses`, in tokens per CPU second. In
`repeating` it generates greedily, which a model with random weights does round and round, so that
nearly all guesses are right. In `new` nearly all are wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from harness.arguments import Arguments
from harness.models import embedded_engine, requests, small_model
from harness.processes import end, environment
from harness.report import Report, make_parts
from harness.rounds import Cost, Ratio, alternate, median_of, timed
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.models import plain
from midflight.models.caches import cache_name
from midflight.models.sizes import FAMILIES

CONTEXT = 256
LONG_CONTEXT = 4096
PREFIX_BYTES = 2**28
Prompts = Sequence[tuple[int, ...]]
Side = Callable[[Prompts, int], int]
"""Generates so many tokens for each prompt, and returns how many those are together."""


# --- Decoding -------------------------------------------------------------------------------------


def engine_side(hidden: int, *, running: int, modules: bool) -> Side:
    families = frozenset[str]() if modules else FAMILIES
    with patch.object(plain, "FAMILIES", families):
        served = embedded_engine(
            small_model(hidden), running=running, context=CONTEXT, max_batch_tokens=4096
        )

    def side(prompts: Prompts, answer: int) -> int:
        answers = served.generate_all(requests(prompts, answer=answer))
        return sum(len(each.token_ids) for each in answers)

    return side


def bare_side(hidden: int) -> Side:
    model = small_model(hidden)
    name = cache_name(model)
    assert name is not None

    @torch.inference_mode()
    def side(prompts: Prompts, answer: int) -> int:
        ids = torch.tensor(prompts)
        kept = {name: DynamicCache()}
        for _ in range(answer):
            out = model(input_ids=ids, **kept, use_cache=True, logits_to_keep=1)
            ids = torch.multinomial(torch.softmax(out.logits[:, -1], -1), 1)
        return answer * len(prompts)

    return side


def products_side(hidden: int) -> Side:
    weights = product_weights(small_model(hidden))

    @torch.inference_mode()
    def side(prompts: Prompts, answer: int) -> int:
        inputs: dict[int, Tensor] = {}
        for weight in weights:
            inputs[weight.shape[1]] = torch.ones(len(prompts), weight.shape[1])
        for _ in range(answer):
            for weight in weights:
                linear(inputs[weight.shape[1]], weight)
        return answer * len(prompts)

    return side


def product_weights(model: Any) -> list[Tensor]:
    """The weights that a step is multiplied with, those of one input as one."""
    weights: list[Tensor] = []
    for layer in model.model.layers:
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights.append(torch.cat([each.weight for each in projections]).detach())
        weights.append(attention.o_proj.weight.detach())
        weights.append(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).detach())
        weights.append(layer.mlp.down_proj.weight.detach())
    weights.append(model.model.embed_tokens.weight.detach())
    return weights


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
    """vLLM in an interpreter of its own."""

    def __init__(
        self, python: Path, hidden: int, *, running: int, threads: int, stack: ExitStack
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="midflight-"))
        small_model(hidden).save_pretrained(folder)
        self._log = Path(folder) / "log"
        log = stack.enter_context(self._log.open("w"))
        environ = environment(
            threads=threads,
            VLLM_CPU_KVCACHE_SPACE="1",
            PATH=f"{python.parent}:/usr/bin:/bin",
            PYTHONPATH="",
        )
        self._child = subprocess.Popen(
            [str(python), "-c", VLLM, folder, str(running), str(CONTEXT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
            cwd=folder,
        )
        stack.callback(end, self._child)
        self._await("READY")

    def __call__(self, prompts: Prompts, answer: int) -> int:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([prompts, answer]) + "\n")
        self._child.stdin.flush()
        return int(self._await("TOKENS"))

    def _await(self, word: str) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise SystemExit(f"vLLM ended: {self._log.read_text()[-2000:]}")


def made_side(
    name: str, options: argparse.Namespace, *, running: int, threads: int, stack: ExitStack
) -> Side:
    if name == "vllm":
        python = options.vllm_python.absolute()
        return Vllm(python, options.hidden, running=running, threads=threads, stack=stack)
    if name == "bare":
        return bare_side(options.hidden)
    if name == "products":
        return products_side(options.hidden)
    return engine_side(options.hidden, running=running, modules=name == "modules")


SIDES = ("modules", "plain", "bare", "products", "vllm")
FIGURES = {"bare": "transformers", "products": "its matrix products alone"}
"""What the page calls the sides that `plain` is held against."""


def decoding(options: argparse.Namespace, report: Report) -> None:
    names = [*options.sides]
    if options.vllm_python:
        names.append("vllm")
    others = [name for name in names if name != "plain"]
    report.say("tokens/s of wall time (of CPU time)")
    ratios = [f"plain / {name}" for name in others]
    table = report.table("requests", "threads", *names, *ratios)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for running in options.running:
            costs = costs_of_sides(names, options, running=running, threads=threads)
            tokens = running * options.answer
            wall = {name: tokens / median_of(costs[name], lambda c: c.wall) for name in names}
            cells: list[str] = []
            for name in names:
                cpu = tokens / median_of(costs[name], lambda c: max(c.cpu, 1e-9))
                shown = "" if name == "vllm" else f" ({cpu:,.0f})"
                cells.append(f"{wall[name]:,.0f}{shown}")
            for name in others:
                ratio = wall["plain"] / wall[name]
                cells.append(f"{ratio:.2f}")
                if name in FIGURES and threads == 1:
                    report.figure(f"decoding {running}: by hand / {FIGURES[name]}", ratio)
            table.row(running, threads, *cells)


def costs_of_sides(
    names: Sequence[str], options: argparse.Namespace, *, running: int, threads: int
) -> dict[str, list[Cost]]:
    """What every side takes for all answers, in each round."""
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 256, (running, options.prompt), generator=draw).tolist()
    prompts = [tuple(row) for row in drawn]
    deeds: dict[str, Callable[[], Cost]] = {}
    with ExitStack() as stack:
        for name in names:
            side = made_side(name, options, running=running, threads=threads, stack=stack)
            side(prompts, 4)
            deeds[name] = lambda side=side: timed(lambda: side(prompts, options.answer))[1]
        return alternate(deeds, rounds=options.rounds)


# --- Prefixes and guesses -------------------------------------------------------------------------


def long_engine(hidden: int, *, running: int, prefix_bytes: int, guesses: int) -> EmbeddedEngine:
    return embedded_engine(
        small_model(hidden, context=LONG_CONTEXT),
        running=running,
        context=LONG_CONTEXT,
        prefix_bytes=prefix_bytes,
        guesses=guesses,
    )


def conversation_seconds(
    engine: EmbeddedEngine, *, conversations: int, turns: int, new: int, answer: int
) -> float:
    """CPU seconds of all turns. Each conversation begins with other tokens than the rest."""
    began = time.process_time()
    told: list[tuple[int, ...]] = []
    for number in range(conversations):
        told.append(tuple((7 * number + k * (number + 1)) % 251 for k in range(new)))
    for turn in range(turns):
        answers = engine.generate_all(requests(told, answer=answer, seed=64 * turn))
        for number, made in enumerate(answers):
            following = tuple((11 * number + k) % 251 for k in range(new))
            told[number] = (*told[number], *made.token_ids, *following)
    return time.process_time() - began


def prefixes(options: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    workloads = {
        "turns": {"conversations": 8, "turns": 10, "new": 256, "answer": 8},
        "short": {"conversations": 64, "turns": 1, "new": 32, "answer": options.answer},
    }
    if options.smoke:
        workloads["turns"] |= {"turns": 2, "new": 16}
    table = report.table("workload", "without, CPU s", "with, CPU s", "without / with")
    for name, shape in workloads.items():

        def seconds(prefix_bytes: int, shape: dict[str, int] = shape) -> float:
            engine = long_engine(
                options.hidden,
                running=shape["conversations"],
                prefix_bytes=prefix_bytes,
                guesses=0,
            )
            return conversation_seconds(engine, **shape)

        found = alternate(
            {
                "without": lambda measure=seconds: measure(0),
                "with": lambda measure=seconds: measure(PREFIX_BYTES),
            },
            rounds=options.rounds,
        )
        ratio = Ratio.of(found["without"], found["with"])
        without = median_of(found["without"], float)
        kept = median_of(found["with"], float)
        table.row(name, f"{without:.2f}", f"{kept:.2f}", ratio)
        report.figure(f"prefixes, {name}: without kept keys / with", ratio.mean)


def guesses(options: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    table = report.table(
        "workload", "requests", "without, tokens/CPU s", "with, tokens/CPU s", "with / without"
    )
    for workload, temperature in (("repeating", 0.0), ("new", 1.0)):
        for running in options.running:
            prompts: list[tuple[int, ...]] = []
            for number in range(running):
                prompts.append(tuple((7 * number + k * k) % 29 for k in range(32)))
            asked = requests(prompts, answer=options.answer, temperature=temperature)

            def speed(ahead: int, asked: Any = asked) -> float:
                engine = long_engine(
                    options.hidden, running=len(asked), prefix_bytes=0, guesses=ahead
                )
                cost = timed(lambda: engine.generate_all(asked))[1]
                return len(asked) * options.answer / cost.cpu

            found = alternate(
                {
                    "without": lambda measure=speed: measure(0),
                    "with": lambda measure=speed: measure(options.guesses),
                },
                rounds=options.rounds,
            )
            ratio = Ratio.of(found["with"], found["without"])
            without = median_of(found["without"], float)
            ahead = median_of(found["with"], float)
            table.row(workload, running, f"{without:.0f}", f"{ahead:.0f}", ratio)


PARTS = {"decoding": decoding, "prefixes": prefixes, "guesses": guesses}


def main() -> None:
    arguments = Arguments(__doc__, rounds=5)
    arguments.option("--parts", ["decoding"], smoke=[*PARTS], choices=[*PARTS])
    arguments.option(
        "--running", [1, 8, 32, 64], smoke=[1, 8], help="requests that are decoded together"
    )
    arguments.option("--threads", [1, 2], smoke=[1])
    arguments.option("--prompt", 32, help="tokens of a prompt, in part `decoding`")
    arguments.option("--answer", 128, smoke=8, help="tokens of an answer")
    arguments.option("--hidden", 256, smoke=64, help="256 is a model of 3.2 million parameters")
    arguments.option("--guesses", 7, help="tokens that are guessed ahead")
    arguments.option(
        "--sides", [*SIDES[:-1]], choices=SIDES[:-1], help="of `decoding`, `plain` among them"
    )
    arguments.option(
        "--vllm-python",
        None,
        type=Path,
        help="interpreter of an environment with vLLM, which is one more side",
    )
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
