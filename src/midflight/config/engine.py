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
    """Which inference server generates: our own, or one of other people in an environment of its
    own (`make engines`).
    """
    count: Positive = 1
    """Engine processes, where there are cores for them. With `urls` or `servers` it is their
    number.
    """
    python: Path | None = None
    """Interpreter of the server's environment. Default `.venv-vllm/bin/python` or
    `.venv-sglang/bin/python`.
    """
    urls: tuple[str, ...] = ()
    """Addresses of servers that run already, such as `http://127.0.0.1:30000`. None is started or
    stopped.
    """
    arguments: tuple[str, ...] = ()
    """Further words for the server's command line, after ours, such as
    `--gpu-memory-utilization=0.5`.
    """
    start_seconds: Seconds = 180.0
    """A server that starts is given up if it neither computes nor reads for so long, one of `urls`
    if it does not answer.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision that engines serve in, and that weights travel in; `auto` is `model.dtype`. Smaller
    is faster, and further from the trainer.
    """
    max_running: Positive = 64
    """Requests decoded together; larger is faster per token and slower per request."""
    max_batch_tokens: Positive = 2048
    """Prompt and decode tokens of one engine step; larger prefills faster, makes steps longer, and
    takes more memory.
    """
    threads: Positive = 1
    """CPU threads of one engine process; more than the free cores makes all slower."""
    device: str = "cpu"
    """The device of the engine: `cpu`, `cuda` (GPUs for each engine), or such as `cuda:1`."""
    share_devices: bool = False
    """Engines may be on GPUs that a trainer rank or another engine has; each then needs a part of
    its memory.
    """
    share: Literal["memory", "time"] = "memory"
    """How engines and trainer share devices: `memory`, both stay there together; `time`, in turns:
    engines sleep while the trainer steps, and while they generate its moments and gradients lie in
    host memory. Each then has nearly all of the device, and the other waits.
    """
    lend: bool = False
    """One more embedded engine in the place of the first trainer rank, which generates while that
    rank waits for a batch.
    """
    servers: tuple[ServerSection, ...] = ()
    """The engines one by one, in place of `count`."""
    deterministic: bool = False
    """An answer does not depend on other requests in the batch. It works with vLLM and SGLang on
    GPUs alone, and is slower.
    """
    guesses: Count = 0
    """The most tokens that the embedded engine guesses ahead from a sequence's own text. Answers
    stay the same. It is faster where answers repeat earlier text and few requests run; else it
    costs time.
    """
    prefix_mb: Count = 256
    """Megabytes of keys and values that the embedded engine keeps of ended requests, for requests
    that begin alike; 0 keeps none.
    """
    prefix_age: Count = 0
    """How many versions old the weights may be that computed these. Larger computes less after each
    handover, with more mismatch between engine and trainer.
    """

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
