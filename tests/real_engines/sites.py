"""The engine port before a real server, its models, and what they are expected to say."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from tests.engines.models import TOKENIZER, MemoryReceiver
from tests.engines.reading import collect, ids
from tests.engines.sites import ModelSite
from tests.real_engines.process import MAX_CONTEXT, MAX_RUNNING, Kind, ServerProcess
from transformers import PreTrainedModel

from midflight.engines.servers.adapters import AdapterEngine
from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Server
from midflight.engines.servers.sglang import SglangServer
from midflight.engines.servers.vllm import VllmServer
from midflight.models.creation import make_model
from midflight.models.load import save_model
from midflight.models.lora import add_adapters, lora_config
from midflight.models.names import assign, named_tensors
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.types import GenerateRequest, Version

STAGING = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


@cache
def tied(version: Version) -> PreTrainedModel:
    return _model(version, is_tied=True)


@cache
def untied(version: Version) -> PreTrainedModel:
    return _model(version, is_tied=False)


def _model(version: Version, *, is_tied: bool) -> PreTrainedModel:
    """Heads are as wide as vLLM needs on a CPU. What layers add is made larger, else a tied model repeats its last token whatever
    came before."""
    model = make_model(
        vocab_size=262,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        max_context=MAX_CONTEXT,
        seed=version,
        dtype="float32",
        tied=is_tied,
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(4)
            layer.mlp.down_proj.weight.mul_(4)
    return model


@cache
def adapted(version: Version) -> PreTrainedModel:
    """Version 0 with adapters of all its linear layers, drawn from the version."""
    model = _model(0, is_tied=True)
    add_adapters(model, lora_config(model, rank=4, alpha=8), seed=version)
    draw = torch.Generator().manual_seed(version)
    assign(model, {name: torch.randn(t.shape, generator=draw) * 0.1 for name, t in named_tensors(model).items()})
    return model


class ServerSite(ModelSite):
    async def seeded(self, request: GenerateRequest) -> tuple[int, ...]:
        """As the server itself says it, asked alone: its noise is another than ours."""
        return ids(await collect(self.engine, replace(request, request_id=f"{request.request_id}-alone")))


def save(model: PreTrainedModel, folder: Path) -> Path:
    save_model(model, folder)
    write_byte_tokenizer(folder)
    return folder


def adapter(kind: Kind, *, num_adapters: int = 0, direct: bool = False) -> Server:
    if kind == "vllm":
        return VllmServer(vocab_size=262, max_running=MAX_RUNNING, num_adapters=num_adapters)
    return SglangServer(vocab_size=262, max_running=MAX_RUNNING, max_context=MAX_CONTEXT, num_adapters=num_adapters, direct=direct)


@asynccontextmanager
async def attached(
    server: ServerProcess, models: Callable[[Version], PreTrainedModel] = tied, *, direct: DirectLoader | None = None, num_adapters: int = 0
) -> AsyncIterator[ModelSite]:
    """A new adapter: it gives the server the weights that it started with, whatever it served before."""
    receiver = MemoryReceiver()
    with tempfile.TemporaryDirectory(dir=STAGING, prefix="midflight-test-") as staging:
        engine = (AdapterEngine if num_adapters else ServerEngine)(
            server.kind,
            server.url,
            adapter(server.kind, num_adapters=num_adapters, direct=direct is not None and direct.swaps),
            tokenizer=TOKENIZER,
            model=server.model,
            receiver=receiver,
            staging=Path(staging),
            direct=direct,
        )
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(engine.run())
            try:
                await engine.attached()
                yield ServerSite(engine, receiver, models)
            finally:
                task.cancel()
