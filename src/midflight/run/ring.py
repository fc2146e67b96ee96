"""The launcher's view of a run: its processes, started together, listened to, restarted within a budget, always stopped.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Ring._trainer` | the trainer's messages | its end | the trainer process |
| `Ring._rollout` | the rollout process's messages | its end, which is an error before the trainer's | cancellation |
| `Ring._engine` (one each) | the engine's messages | its end; then it starts it again | cancellation, or a spent budget |

Torch-free: this process only watches.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from midflight.config.sections import Config
from midflight.errors import RunFailed
from midflight.run.messages import EngineSpec, Failed, Message, ModelReady, Part, RolloutSpec, TrainerSpec
from midflight.run.parts import serve_while
from midflight.run.process import Child, stop_all


class PartFailed(RunFailed):
    """A process ended that should not have. `config`: the configuration is to blame and a restart would not help."""

    def __init__(self, message: str, *, config: bool) -> None:
        super().__init__(message)
        self.config = config


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, inherited by the part that serves it: the address is known before the part is, and outlives it."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise RunFailed(f"cannot listen on {host}:{port}: {error.strerror}; choose another gateway.port, or 0 for a free one") from error
    made.listen(1024)
    made.setblocking(False)
    return made


class Ring:
    """One attempt at a run. `on_message` hears everything the parts say; it must not raise or wait."""

    def __init__(self, config: Config, *, on_message: Callable[[Message], None], model: ModelReady | None = None) -> None:
        self._config, self._on_message = config, on_message
        self._given_model = model
        self._token = secrets.token_hex(16)
        self._engine_restarts = config.run.restarts
        self.children: list[Child] = []

    async def train(self, *, resume: bool) -> None:
        """Returns when the trainer has finished all steps and its last version is evaluated and exported."""
        await self._run(lambda: self._trainer(resume=resume), purpose="train")

    async def serve(self, *, purpose: str) -> None:
        """Engines and gateway without a trainer. `serve` ends only by cancellation, `evaluate` with its scores."""
        await self._run(None, purpose=purpose)

    async def _run(self, trainer: Callable[[], Coroutine[Any, Any, None]] | None, *, purpose: str) -> None:
        gateway = self._config.gateway
        self._socket = listen(gateway.host, gateway.port)
        self._engine_sockets = [listen("127.0.0.1", 0) for _ in range(self._config.engine.count)]
        self._model: asyncio.Future[ModelReady] = asyncio.get_running_loop().create_future()
        if self._given_model is not None:
            self._model.set_result(self._given_model)
        engines = [self._engine(index) for index in range(self._config.engine.count)]
        rollout = self._rollout(purpose)
        try:
            if trainer is None:
                await serve_while(rollout, *engines)
            else:
                await serve_while(trainer(), rollout, *engines)
        finally:
            await stop_all(self.children, seconds=self._config.run.stop_seconds - 0.5)
            for made in (self._socket, *self._engine_sockets):
                made.close()

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def _trainer(self, *, resume: bool) -> None:
        trainer = await self._start(Part.TRAINER, "trainer")
        spec = TrainerSpec(self._config.model_dump_json(), self.url, self._token, resume)
        await trainer.tell(spec)
        await self._follow(trainer)

    async def _rollout(self, purpose: str) -> None:
        rollout = await self._start(Part.ROLLOUT, "rollout", sockets=[self._socket])
        model = await self._model
        engines = {f"engine{i}": f"http://127.0.0.1:{s.getsockname()[1]}" for i, s in enumerate(self._engine_sockets)}
        spec = RolloutSpec(
            config=self._config.model_dump_json(),
            model=model.folder,
            socket_fd=self._socket.fileno(),
            port=self._socket.getsockname()[1],
            token=self._token,
            engines=engines,
            purpose=purpose,
            version=model.version,
            checkpoint=model.checkpoint,
        )
        await rollout.tell(spec)
        await self._follow(rollout)
        if purpose == "train":
            raise PartFailed("the rollout process ended before the trainer did", config=False)

    async def _engine(self, index: int) -> None:
        """Runs one engine, and starts it again when it dies: it comes back with the first weights, in quarantine."""
        name, made = f"engine{index}", self._engine_sockets[index]
        while True:
            engine = await self._start(Part.ENGINE, name, sockets=[made])
            model = await self._model
            config = self._config.model_dump_json()
            await engine.tell(EngineSpec(name, model.folder, config, made.fileno(), self._token, model.version))
            try:
                await self._follow(engine)
            except PartFailed as failure:
                if failure.config or self._engine_restarts == 0:
                    raise
                self._engine_restarts -= 1

    async def _start(self, part: Part, name: str, *, sockets: list[socket.socket] | None = None) -> Child:
        threads = {Part.ENGINE: self._config.engine.threads, Part.TRAINER: self._config.trainer.threads}.get(part, 1)
        environ = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        log = Path(self._config.run.folder) / "logs" / f"{name}.log"
        child = Child(part, name, log=log, environ=environ, sockets=sockets or [])
        self.children.append(child)
        await child.start()
        return child

    async def _follow(self, child: Child) -> None:
        """Hears the child until it ends; its failure is ours, with its traceback (I9). Ended by the child."""
        failed: Failed | None = None
        async for message in child.messages():
            if isinstance(message, Failed):
                failed = message
            elif isinstance(message, ModelReady) and not self._model.done():
                self._model.set_result(message)
            self._on_message(message)
        status = await child.ended()
        if failed is not None:
            raise PartFailed(f"{child.name}: {failed.error}\n{failed.traceback}", config=failed.config)
        if status != 0:
            raise PartFailed(str(child.died(status)), config=False)
