"""The options of engines, with their checks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from midflight.config.devices import ServerSection
from midflight.config.model import ModelSection
from midflight.config.section import Count, Positive, Seconds, Section

_URL = re.compile(r"https?://[^\s/?#@]+/?")


class EngineSection(Section):
    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    """The engine that generates answers. It is ours or a server (docs/engines.md)."""
    count: Positive = 1
    """Engine processes; with `urls` or `servers` their number."""
    python: Path | None = None
    """Interpreter of the server. Default: `.venv-vllm/bin/python` or `.venv-sglang/bin/python`."""
    urls: tuple[str, ...] = ()
    """Addresses of servers that run already, such as `http://127.0.0.1:30000`."""
    arguments: tuple[str, ...] = ()
    """Further options of the server's command line, such as `--gpu-memory-utilization=0.5`."""
    start_seconds: Seconds = 180.0
    """How long a starting server may do nothing, or one of `urls` not answer."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of weights in engines; `auto` is `model.dtype`. Smaller is faster, and further from
    the trainer.
    """
    max_running: Positive = 64
    """Requests decoded together; larger is faster per token and slower per request."""
    max_batch_tokens: Positive = 2048
    """Tokens of an engine step; larger prefills faster, makes steps longer, and takes memory."""
    threads: Positive = 1
    """CPU threads of an engine; more than the free cores slow all."""
    device: str = "cpu"
    """`cpu`, `cuda` (GPUs for each engine), or such as `cuda:1`."""
    share_devices: bool = False
    """Engines may share GPUs with trainer ranks and each other, each in a part of memory."""
    share: Literal["memory", "time"] = "memory"
    """How they share devices: together in memory, or in turns (docs/gpu.md#one-gpu-in-turns)."""
    lend: bool = False
    """One more embedded engine generates while the first trainer rank waits for a batch."""
    servers: tuple[ServerSection, ...] = ()
    """The engines one by one, in place of `count`."""
    deterministic: bool = False
    """Answers do not depend on other requests; slower. vLLM and SGLang on GPUs alone."""
    guesses: Count = 0
    """Tokens that the embedded engine guesses ahead; faster where few requests run that repeat
    earlier text.
    """
    prefix_mb: Count = 256
    """MB of keys and values that the embedded engine keeps for requests that begin alike."""
    prefix_age: Count = 0
    """How many versions old these may be; larger computes less, with more mismatch."""

    @property
    def shares_devices(self) -> bool:
        """True if several processes may be on one GPU."""
        return self.share_devices or self.takes_turns

    @property
    def takes_turns(self) -> bool:
        """True if engines sleep while the trainer steps."""
        return self.share == "time"

    def served_dtype(self, trained: str) -> str:
        """The precision of the weights in engines, of weights that are trained in another."""
        return trained if self.dtype == "auto" else self.dtype


def engine_contradictions(engine: EngineSection, model: ModelSection) -> Iterator[str]:
    e = engine
    started = e.kind != "embedded" and not e.urls
    if e.guesses >= model.max_context:
        yield (
            f"engine.guesses ({e.guesses}) must be less than model.max_context "
            f"({model.max_context}); lower it"
        )
    if e.urls and e.kind == "embedded":
        yield (
            'engine.urls are of servers that run already, but engine.kind is "embedded", which '
            'is started here; set engine.kind to "vllm" or "sglang"'
        )
    if e.python is not None and not started:
        yield (
            f"engine.python ({e.python}) is for a server that is started here, and none is; "
            "remove it"
        )
    if e.arguments and not started:
        yield (
            f"engine.arguments ({' '.join(e.arguments)}) are for a server that is started here, "
            "and none is; remove them"
        )
    if e.kind != "embedded" and e.served_dtype(model.dtype) == "float64":
        yield (
            f'engine.kind = "{e.kind}" cannot serve float64; set engine.dtype to "float32", or '
            'engine.kind to "embedded"'
        )
    if e.deterministic:
        why = _not_deterministic(e)
        if why:
            yield f"engine.deterministic asks for what cannot be had: {why}; remove it"
    for url in e.urls:
        if not _URL.fullmatch(url):
            yield f"engine.urls must be addresses such as http://127.0.0.1:30000, got {url!r}"
    if len(set(e.urls)) < len(e.urls):
        yield (
            "engine.urls names a server twice, which would get every version twice; name each once"
        )
    if e.urls and e.count not in (1, len(e.urls)):
        yield (
            f"engine.count ({e.count}) is not the number of engine.urls ({len(e.urls)}); remove it"
        )


def _not_deterministic(engine: EngineSection) -> str:
    """Returns the reason why an engine cannot compute each answer as if it were alone, or an empty
    string if it can.
    """
    if engine.kind == "embedded":
        return (
            "the embedded engine samples by seed and position already, and has no kernels whose "
            "rounding is the same in every batch"
        )
    if engine.kind == "vllm" and engine.urls:
        return (
            "a vLLM server that runs already does not say whether it was started with "
            "VLLM_BATCH_INVARIANT=1"
        )
    if engine.device == "cpu" and not engine.urls:
        name = "vLLM" if engine.kind == "vllm" else "SGLang"
        return f"{name} has such kernels for GPUs alone, and engine.device is cpu"
    return ""
