"""The command lines of vLLM and SGLang. A server is started so that it can be paused, given
weights, and trusted.

All functions are pure. The purpose of each option is written beside it, and docs/engines.md says
the same to users.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from midflight.config.devices import VISIBLE, VLLM_RANKS, ServerSection, visible
from midflight.config.engine import EngineSection
from midflight.types import Version
from midflight.types.generation import MAX_TOP_LOGPROBS

INSIDE = Path(__file__).parent / "inside"
"""Modules that run in the server's interpreter, which has no Midflight: each is one file that
imports nothing of ours.
"""
HOST = "127.0.0.1"
"""The address that servers listen on. Their admin routes can change the weights and ask for no key,
so only this machine may reach them.
"""
READY = {"vllm": "/health", "sglang": "/model_info"}
"""The route that each kind answers with 200 as soon as it takes requests, paused or not."""
_OURS = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables that would mix our environment into the server's."""
_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""This variable nearly doubles the time that a server takes to start, each time."""


@dataclass(frozen=True, slots=True)
class Command:
    """The start of a process. `environ` is its whole environment."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the server has to serve. `dtype` is torch's name. `kv_bytes_per_token` counts
    all layers.
    """

    folder: Path
    name: str
    dtype: str
    max_context: int
    kv_bytes_per_token: int
    version: Version
    records_experts: bool = False
    """True if the model is a mixture and the server has to report which experts it chose."""
    num_adapters: int = 0
    """The number of versions that the server keeps side by side. It is 0 unless versions are
    adapters of rank `rank` for the layers `targets`.
    """
    rank: int = 0
    targets: tuple[str, ...] = ()
    own_transfer: bool = False
    """True if the server's own transfer engine receives versions, and not our plugin's."""
    has_other_towers: bool = False
    """True if the model also reads other things than text, such as images. They are not served."""


def server_command(
    engine: EngineSection,
    model: ServedModel,
    *,
    python: Path,
    port: int,
    inherited: Mapping[str, str],
) -> Command:
    """The command of a server on this machine at `HOST`: the first of `engine.servers`, if there
    are any. It starts from the environment `inherited`.
    """
    if engine.kind == "vllm":
        words, settings = _vllm(engine, model, port)
    else:
        words, settings = _sglang(engine, model, port)
    server = engine.servers[0] if engine.servers else ServerSection()
    argv = [str(python), "-m"]
    argv += words
    argv += _parallel(engine.kind, server)
    argv += engine.arguments
    environ = dict(_cleaned(inherited, python))
    environ |= _device(engine.device, server.devices, inherited)
    environ |= settings
    environ |= {
        "PYTHONPATH": str(INSIDE),
        "OMP_NUM_THREADS": str(engine.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Command(tuple(argv), environ)


def _parallel(kind: str, server: ServerSection) -> Sequence[str]:
    """The options that spread the server over several processes. There are none if it is one
    process.
    """
    if kind == "vllm":
        names = ("tensor-parallel", "pipeline-parallel", "data-parallel")
    else:
        names = ("tp", "pp", "dp")
    sizes = (server.tensor_parallel, server.pipeline_parallel, server.data_parallel)
    return [f"--{name}-size={size}" for name, size in zip(names, sizes, strict=True) if size > 1]


def _vllm(
    engine: EngineSection, model: ServedModel, port: int
) -> tuple[Sequence[str], Mapping[str, str]]:
    words = ["vllm.entrypoints.openai.api_server"]
    words += ["--model", str(model.folder), "--served-model-name", model.name]
    words += ["--host", HOST, "--port", str(port)]
    words += ["--dtype", model.dtype, "--max-model-len", str(model.max_context)]
    words += ["--max-num-seqs", str(engine.max_running)]
    # vLLM refuses fewer tokens than sequences.
    words += ["--max-num-batched-tokens", str(max(engine.max_batch_tokens, engine.max_running))]
    # This opens the route that takes and gives token ids, and names versions.
    words += ["--enable-scale-out"]
    # Otherwise sampling defaults come from the model folder.
    words += ["--generation-config", "vllm"]
    # The sampled token counts as one.
    words += ["--max-logprobs", str(MAX_TOP_LOGPROBS + 1)]
    # Log-probabilities are of the distribution sampled from, not of temperature 1.
    words += ["--logprobs-mode", "processed_logprobs"]
    words += ["--worker-extension-cls", "midflight_vllm.Loader"]
    # The backend that receives weights that come straight from the trainer: ours, or vLLM's own.
    backend = "nccl" if model.own_transfer else "midflight"
    words += ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
    # Our plugin fills the masks of this backend.
    words += ["--structured-outputs-config", '{"backend": "guidance"}']
    words += ["--disable-uvicorn-access-log"]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",  # opens the control routes
        "VLLM_NO_USAGE_STATS": "1",
    }
    if engine.deterministic:
        settings["VLLM_BATCH_INVARIANT"] = "1"
    if engine.takes_turns and engine.device != "cpu":
        # Opens the memory that it sleeps without. On a CPU vLLM refuses to start with it.
        words += ["--enable-sleep-mode"]
    if model.num_adapters:
        settings["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # opens the routes that load adapters
        # With less room vLLM would drop an adapter that is in use.
        room = str(model.num_adapters)
        rank = next(rank for rank in VLLM_RANKS if rank >= model.rank)
        words += ["--enable-lora", "--max-loras", room, "--max-cpu-loras", room]
        words += ["--max-lora-rank", str(rank)]
    if model.has_other_towers:
        # Only text is trained, and the parts that read images would take memory.
        words += ["--language-model-only"]
    # On a CPU vLLM refuses to start with this option.
    if model.records_experts and engine.device != "cpu":
        words += ["--enable-return-routed-experts"]
    if engine.device == "cpu":
        words += ["--enforce-eager"]  # compiling takes up to minutes
        cache = model.kv_bytes_per_token * model.max_context * engine.max_running
        # vLLM takes whole GiB only.
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(cache / 2**30)))
        # Otherwise two processes wait for each other by spinning.
        settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Otherwise the first request compiles C++, which needs a compiler.
        settings["TORCHDYNAMO_DISABLE"] = "1"
        if engine.servers and engine.servers[0].world_size > 1:
            # Otherwise each of its processes wants a NUMA node of its own.
            settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return words, settings


def _sglang(
    engine: EngineSection, model: ServedModel, port: int
) -> tuple[Sequence[str], Mapping[str, str]]:
    words = ["sglang.launch_server"]
    words += ["--model-path", str(model.folder), "--served-model-name", model.name]
    words += ["--host", HOST, "--port", str(port)]
    words += ["--dtype", model.dtype, "--context-length", str(model.max_context)]
    words += ["--max-running-requests", str(engine.max_running)]
    words += ["--chunked-prefill-size", str(engine.max_batch_tokens)]
    # Otherwise sampling defaults come from the model folder.
    words += ["--sampling-defaults", "openai"]
    words += ["--weight-version", str(model.version)]
    # Otherwise each event repeats all tokens before it.
    words += ["--incremental-streaming-output"]
    # This is our plugin's backend, which takes an answer's grammar from any token on.
    words += ["--grammar-backend", "midflight"]
    # The warmup asks through a proxy, if the environment names one.
    words += ["--skip-server-warmup"]
    words += ["--log-level-http", "warning"]
    if model.num_adapters:
        room = str(model.num_adapters)
        words += ["--enable-lora", "--max-loras-per-batch", room, "--max-loaded-loras", room]
        words += ["--max-lora-rank", str(model.rank), "--lora-target-modules"]
        words += model.targets
    if model.records_experts:
        words += ["--enable-return-routed-experts"]
    settings = {
        # Otherwise a pause makes /health fail, and the server stays unhealthy.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Otherwise a request that is retracted and aborted loses its last tokens.
        "SGLANG_FORCE_STREAM_INTERVAL": "1",
    }
    if engine.takes_turns and engine.device != "cpu":
        # Otherwise it forgets its weights when it sleeps.
        words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if engine.deterministic:
        words += ["--enable-deterministic-inference"]
    if engine.device != "cpu" and model.dtype == "float32":
        # SGLang's own kernels for norms take 16 bits alone, and its server would not start.
        settings["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    if engine.device == "cpu":
        words += ["--device", "cpu", "--attention-backend", "torch_native"]
        if model.num_adapters:
            words += ["--lora-backend", "torch_native"]
        # Otherwise it waits by spinning, on a core that others could use.
        words += ["--sleep-on-idle"]
        # Otherwise it takes a share of all memory.
        words += ["--max-total-tokens", str(model.max_context * engine.max_running)]
        settings["SGLANG_USE_CPU_ENGINE"] = "1"
    return words, settings


def _cleaned(inherited: Mapping[str, str], python: Path) -> Mapping[str, str]:
    """The environment without our tokens, our virtual environment and its programs. The server's
    own programs come first.
    """
    environ: dict[str, str] = {}
    for name, value in inherited.items():
        if name in _OURS or name == _BYTECODE or name.startswith("MIDFLIGHT_"):
            continue
        environ[name] = value
    our_programs = ""
    if "VIRTUAL_ENV" in inherited:
        our_programs = str(Path(inherited["VIRTUAL_ENV"]) / "bin")
    places = [str(python.parent)]
    for place in environ.get("PATH", "").split(":"):
        if place and place != our_programs:
            places.append(place)
    environ["PATH"] = ":".join(places)
    return environ


def _device(device: str, devices: Sequence[int], inherited: Mapping[str, str]) -> Mapping[str, str]:
    """The variable that shows the server only its devices: `devices`, or the N of `cuda:N`. Each is
    a number among the devices that we may use. `cuda` leaves the choice to the server.
    """
    _, _, number = device.partition(":")
    named = (int(number),) if number else tuple(devices)
    if not named:
        return {}
    return {VISIBLE: visible(named, inherited)}
