"""The command lines of vLLM and SGLang: how a server is started so that it can be paused, given
weights, and trusted.

Pure. What each option is for stands beside it; docs/engines.md says the same to users.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from midflight.config.devices import VISIBLE, VLLM_RANKS, ServerSection, visible
from midflight.config.sections import EngineSection
from midflight.types import Version
from midflight.types.generation import MAX_TOP_LOGPROBS

INSIDE = Path(__file__).parent / "inside"
"""Modules that run in the server's interpreter, which has no Midflight: each is one file that
imports nothing of ours.
"""
HOST = "127.0.0.1"
"""Whoever reaches a server's admin routes can change its weights, and they ask for no key: only
this machine may.
"""
READY = {"vllm": "/health", "sglang": "/model_info"}
"""What each kind answers with 200 as soon as it takes requests, paused or not."""
_OURS = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Would mix our environment into the server's."""
_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Nearly doubles the time that a server takes to start, each time."""


@dataclass(frozen=True, slots=True)
class Command:
    """`environ` is all of it."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Served:
    """The model as the server is to serve it. `dtype` is torch's name; `kv_bytes_per_token` is of
    all layers.
    """

    folder: Path
    name: str
    dtype: str
    max_context: int
    kv_bytes_per_token: int
    version: Version
    records_experts: bool = False
    """Whether it is a mixture that is to say which experts it chose."""
    num_adapters: int = 0
    """Versions that it keeps side by side, where they are adapters of this rank and these layers;
    else 0.
    """
    rank: int = 0
    targets: tuple[str, ...] = ()
    has_other_towers: bool = False
    """Whether it reads more than text, such as images, of which nothing is served."""


def server_command(
    engine: EngineSection, model: Served, *, python: Path, port: int, inherited: Mapping[str, str]
) -> Command:
    """For a server on this machine at `HOST`, the first of `engine.servers` where there are any. It
    starts from the environment `inherited`.
    """
    words, settings = (_vllm if engine.kind == "vllm" else _sglang)(engine, model, port)
    server = engine.servers[0] if engine.servers else ServerSection()
    environ = {
        **_cleaned(inherited, python),
        **_device(engine.device, server.devices, inherited),
        **settings,
    }
    environ |= {
        "PYTHONPATH": str(INSIDE),
        "OMP_NUM_THREADS": str(engine.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Command(
        (
            str(python),
            "-m",
            *words,
            *_laid(engine.kind, server),
            *engine.arguments,
            *server.arguments,
        ),
        environ,
    )


def _laid(kind: str, server: ServerSection) -> Sequence[str]:
    """Over how many processes, in the server's own words; nothing where it is one."""
    names = (
        ("tensor-parallel", "pipeline-parallel", "data-parallel")
        if kind == "vllm"
        else ("tp", "pp", "dp")
    )
    sizes = (server.tensor_parallel, server.pipeline_parallel, server.data_parallel)
    return [f"--{name}-size={size}" for name, size in zip(names, sizes, strict=True) if size > 1]


def _vllm(
    engine: EngineSection, model: Served, port: int
) -> tuple[Sequence[str], Mapping[str, str]]:
    words = [
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model.folder), "--served-model-name", model.name),
        *("--host", HOST, "--port", str(port)),
        *("--dtype", model.dtype, "--max-model-len", str(model.max_context)),
        *("--max-num-seqs", str(engine.max_running)),
        # fewer is refused
        *("--max-num-batched-tokens", str(max(engine.max_batch_tokens, engine.max_running))),
        "--enable-scale-out",  # the route that takes and gives token ids, and names versions
        *("--generation-config", "vllm"),  # else sampling defaults come from the model folder
        *("--max-logprobs", str(MAX_TOP_LOGPROBS + 1)),  # the sampled token counts
        # of the distribution sampled from, not of temperature 1
        *("--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", "midflight_vllm.Loader"),
        # it takes in what comes straight from the trainer
        *("--weight-transfer-config", '{"backend": "midflight"}'),
        *("--structured-outputs-config", '{"backend": "guidance"}'),  # whose masks our plugin fills
        "--disable-uvicorn-access-log",
    ]
    # the first opens the control routes
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if engine.deterministic:
        settings["VLLM_BATCH_INVARIANT"] = "1"
    if model.num_adapters:
        settings["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # routes that load them
        room = str(model.num_adapters)  # with less it would drop one that is in use
        words += ["--enable-lora", "--max-loras", room, "--max-cpu-loras", room]
        words += ["--max-lora-rank", str(next(rank for rank in VLLM_RANKS if rank >= model.rank))]
    if model.has_other_towers:
        # only text is trained, and what reads images would take memory
        words.append("--language-model-only")
    if model.records_experts and engine.device != "cpu":  # on a CPU it refuses to start with it
        words.append("--enable-return-routed-experts")
    if engine.device == "cpu":
        words.append("--enforce-eager")  # compiling takes up to minutes
        cache = model.kv_bytes_per_token * model.max_context * engine.max_running
        # GiB, and whole ones only
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(cache / 2**30)))
        # two processes that wait for each other by spinning
        settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # else the first request compiles C++, for which there must be a compiler
        settings["TORCHDYNAMO_DISABLE"] = "1"
        if any(server.world_size > 1 for server in engine.servers[:1]):
            # else each of its processes wants a NUMA node of its own
            settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return words, settings


def _sglang(
    engine: EngineSection, model: Served, port: int
) -> tuple[Sequence[str], Mapping[str, str]]:
    words = [
        "sglang.launch_server",
        *("--model-path", str(model.folder), "--served-model-name", model.name),
        *("--host", HOST, "--port", str(port)),
        *("--dtype", model.dtype, "--context-length", str(model.max_context)),
        *("--max-running-requests", str(engine.max_running)),
        *("--chunked-prefill-size", str(engine.max_batch_tokens)),
        *("--sampling-defaults", "openai"),  # else they come from the model folder
        *("--weight-version", str(model.version)),
        "--incremental-streaming-output",  # else each event repeats all tokens before it
        # our plugin's, which takes an answer's grammar from any token on
        *("--grammar-backend", "midflight"),
        "--skip-server-warmup",  # it asks through a proxy, if the environment names one
        *("--log-level-http", "warning"),
    ]
    if model.num_adapters:
        room = str(model.num_adapters)
        words += ["--enable-lora", "--max-loras-per-batch", room, "--max-loaded-loras", room]
        words += ["--max-lora-rank", str(model.rank), "--lora-target-modules", *model.targets]
    if model.records_experts:
        words.append("--enable-return-routed-experts")
    settings = {
        # else a pause makes /health fail, and it stays unhealthy
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # else a request that is retracted and aborted loses its last tokens
        "SGLANG_FORCE_STREAM_INTERVAL": "1",
    }
    if engine.deterministic:
        words.append("--enable-deterministic-inference")
    if engine.device == "cpu":
        words += ["--device", "cpu", "--attention-backend", "torch_native"]
        words += ["--lora-backend", "torch_native"] if model.num_adapters else []
        # else it waits by spinning, on a core that others could use
        words.append("--sleep-on-idle")
        # else a share of all memory
        words += ["--max-total-tokens", str(model.max_context * engine.max_running)]
        settings["SGLANG_USE_CPU_ENGINE"] = "1"
    return words, settings


def _cleaned(inherited: Mapping[str, str], python: Path) -> Mapping[str, str]:
    """Without what is ours: tokens, our virtual environment, its programs. The server's own
    programs come first.
    """
    kept = {
        k: v
        for k, v in inherited.items()
        if k not in (*_OURS, _BYTECODE) and not k.startswith("MIDFLIGHT_")
    }
    ours = (
        {str(Path(inherited["VIRTUAL_ENV"]) / "bin")} if "VIRTUAL_ENV" in inherited else set[str]()
    )
    places = [place for place in kept.get("PATH", "").split(":") if place and place not in ours]
    return {**kept, "PATH": ":".join([str(python.parent), *places])}


def _device(device: str, devices: Sequence[int], inherited: Mapping[str, str]) -> Mapping[str, str]:
    """`devices`, or the N of `cuda:N`, are of those that we may use; the server sees them alone.
    `cuda` leaves the choice to the server.
    """
    _, _, number = device.partition(":")
    named = (int(number),) if number else tuple(devices)
    return {VISIBLE: visible(named, inherited)} if named else {}
