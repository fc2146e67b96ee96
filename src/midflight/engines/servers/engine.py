"""A real inference server behind the engine port: requests, pauses and weights, over whatever wire
the server has.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `ServerEngine.run` | nothing | its end | cancellation |
| `_read` (one each request) | events of the server | the gate; the next event | `resume`; the server; an abort, which cancels it |
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from midflight import types
from midflight.config.engine import EngineSection
from midflight.engines.embedded.grammar import Grammars
from midflight.engines.requests import check_features, check_request
from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.server import (
    Attempt,
    Server,
    ServerClient,
    ServerDescription,
    ServerRequest,
    Works,
    check_same_model,
    mode_at_server,
)
from midflight.engines.servers.staged import StagedFolder, StagingArea
from midflight.engines.streams import ChunkStream
from midflight.errors import EngineError, EngineUnavailable, MidflightError, PauseIgnored
from midflight.ports import WeightReceiver
from midflight.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_LAST_WORDS_SECONDS = 2.0
"""The time that a server may take to end a request that it was told to abort, with its last tokens.
After that the answer ends here without them.
"""
_QUIET_SECONDS = 0.02
"""The shortest time between two readings that show a pause. Tokens that were on their way when the
last step ended have come by then.
"""
_MOST_QUIET_SECONDS = 0.5
"""The longest time between two such readings. On a busy machine tokens are as late as answers, so
between these two limits the wait is as long as an answer took.
"""
_MAX_READINGS = 50
"""A server that still makes tokens after so many readings ignores its pause."""
_ALL_PARTS = frozenset(types.MemoryPart)
_ABORTED = types.Finish(types.FinishReason.ABORT)


class ServerEngine:
    """Implements the engine port. `run` holds the connection, and nothing else works without it.

    New requests wait here while the server is paused, so that none is caught in the server's own
    gate. Weights are staged in a folder of ours and loaded by the server in a pause. If a load
    fails, the server is paused until another succeeds: it never serves weights that are not whole
    (I7).
    """

    _merges = True  # true if versions that are adapters are merged into their base

    def __init__(
        self,
        name: str,
        url: str,
        server: Server,
        *,
        tokenizer: Tokenizer,
        model: Path,
        receiver: WeightReceiver,
        staging: Path,
        version: types.Version = 0,
        num_workers: int | None = None,
        direct: DirectLoader | None = None,
        start_seconds: float = EngineSection().start_seconds,
        works: Works | None = None,
    ) -> None:
        """`model` is the folder with the weights of `version`. The server starts with them
        (`first_folder`), or gets them when it is attached. `num_workers` is the number of processes
        that must compute for the server; `None` allows any number. `ServerClient` explains
        `start_seconds` and `works`.
        """
        self._num_workers = num_workers
        self._name = name
        self._server = server
        self.tokenizer = tokenizer
        self._client = ServerClient(name, url, patience_seconds=start_seconds, works=works)
        self._direct = direct
        self._area = StagingArea(staging, model=model, receiver=receiver, merges=self._merges)
        self._first = self._area.begin(version)
        self._live = self._first
        self._next: StagedFolder | None = None
        self._found: ServerDescription | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[ServerRequest, None] = {}
        self._control = asyncio.Lock()
        self._staging = asyncio.Lock()
        self._gate = asyncio.Event()
        self._idle = asyncio.Event()
        self._attached = asyncio.Event()
        self._gate.set()
        self._idle.set()
        self._paused: types.PauseMode | None = None
        self._held = False
        """True if the server has confirmed that it is paused, in that mode."""
        self._whole = True
        """True if the weights at the server are whole."""
        self._asleep = set[types.MemoryPart]()
        """The parts of its memory that the server may have given away."""
        self._is_asleep = False
        """True if it has confirmed that it has given all of them away."""
        self._num_tokens = 0
        self._asking: asyncio.Future[tuple[StagedFolder, str]] | None = None
        """The question which weights the server serves, while the question is under way."""
        self._grammars: Grammars | None = None
        """Made for the first request with a grammar."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> types.Capabilities:
        if self._found is None:
            raise self._client.unavailable("has not been attached yet")
        return self._found.capabilities

    async def run(self) -> None:
        """Attaches, then serves until cancelled. Raises `EngineError` if we cannot work with the
        server.
        """
        try:
            async with self._client:
                await self._attach()
                async with asyncio.TaskGroup() as tasks:
                    await self._serve(tasks)
        finally:
            self._area.remove()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        """Waits until it is cancelled, and then ends all requests. After that no task is started in
        the group, which ends.
        """
        self._tasks = tasks
        self._attached.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._tasks = None
            for running in list(self._running):
                running.stream.fail(self._client.unavailable("has been left"))
                self._leave(running)

    async def attached(self) -> str:
        """Waits until `run` has attached. The wait ends with that, or with the failure of the task
        group. Returns a warning about the server for people, or an empty string.
        """
        await self._attached.wait()
        return self._found.caution if self._found else ""

    # --- Requests ---------------------------------------------------------------------------------

    async def generate(self, request: types.GenerateRequest) -> AsyncGenerator[types.Chunk]:
        """Yields until a chunk with `finish`. Each wait is for the server, or for the end of a
        pause.
        """
        request = request.with_own_ids
        capabilities = self.capabilities
        sampling = request.sampling
        check_request(
            request, vocab_size=capabilities.vocab_size, max_context=capabilities.max_context
        )
        check_features(sampling, capabilities.features, engine=self._name)
        if self._tasks is None:
            raise self._client.unavailable("is not attached")
        ends: list[int] = []
        if not sampling.ignore_eos or sampling.grammar is not None:
            ends += sorted(self.tokenizer.eos_token_ids)
        ends += sampling.stop_token_ids
        running = ServerRequest(request, ChunkStream(eager=request.eager), ends=tuple(ends))
        if request.remaining <= 0 or len(request.input_ids) == capabilities.max_context:
            version = self._live.version
            finish = types.Finish(types.FinishReason.LENGTH)
            yield types.Chunk((), (), version, version, finish)
            return
        self._running[running] = None
        running.reading = self._tasks.create_task(self._read(running))
        try:
            async for chunk in running.stream:
                yield chunk
        finally:
            running.stream.close()
            if not running.ended:
                self._leave(running)
                self._tell_abort(running)

    async def _read(self, running: ServerRequest) -> None:
        """Waits for the request's grammar and the gate, then for events up to the last. Errors go
        to the request's stream, and end nothing else.
        """
        try:
            if running.request.sampling.grammar is not None:
                running.shape = await asyncio.to_thread(self._shape, running)
            await self._gate.wait()
            self._idle.clear()
            running.attempt = Attempt(self._live.version)
            running.adapter = self._live.adapter
            path, body = self._server.body(running, salt=f"v{self._live.version}")
            reader = self._server.reader(running.request)
            async for event in self._client.events(path, body):
                tokens = reader.read(event)
                num = len(tokens.token_ids)
                if len(tokens.logprobs) != num or len(tokens.top_logprobs) not in (0, num):
                    raise self._client.unavailable(
                        f"sent {num} tokens with {len(tokens.logprobs)} log-probabilities"
                    )
                foreign = [label for label, _, _ in tokens.spans if not label.isdigit()]
                if foreign and not running.adapter:
                    raise self._client.unavailable(
                        f"answers by weights that it calls {foreign[0]!r}, which is no version: it "
                        "was started again"
                    )
                given = running.take(running.attempt, tokens)
                self._num_tokens += len(given.token_ids)
                if given.finish is not None:
                    self._leave(running)
                    return
            raise self._client.unavailable("ended an answer without saying how")
        except MidflightError as error:
            if not running.ended:
                running.stream.fail(error)
                self._leave(running)

    def _shape(self, running: ServerRequest) -> str:
        """The text for our plugin in the server. Blocking. A grammar that does not compile is
        refused here as by every engine, although the server would refuse it too.
        """
        request = running.request
        sampling = request.sampling
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, vocab_size=self.capabilities.vocab_size)
        assert sampling.grammar is not None
        output_ids = request.input_ids[request.num_prompt_tokens :]
        return self._grammars.for_server(
            sampling.grammar, output_ids, barred=running.ends, least=sampling.min_tokens
        )

    def _leave(self, running: ServerRequest) -> None:
        """Forgets a request that has ended, and stops reading its answer."""
        running.ended = True
        self._running.pop(running, None)
        if not any(other.attempt for other in self._running):
            self._idle.set()
        if running.reading is not None and running.reading is not asyncio.current_task():
            running.reading.cancel()

    # --- Aborts -----------------------------------------------------------------------------------

    async def abort(self, request_id: str | None) -> None:
        """A request that has tokens ends with the server's last words. A request that has none, or
        is frozen, ends here at once, because a server forgets an abort that comes before its
        request.
        """
        if request_id is None:
            self._abort_these(list(self._running))
        else:
            self._abort_these([r for r in self._running if r.request.request_id == request_id])

    def _abort_these(self, requests: list[ServerRequest]) -> None:
        for running in requests:
            has_tokens = running.attempt is not None and running.attempt.num_tokens > 0
            if not has_tokens or self._paused is not None:
                self._end_here(running)
            else:
                self._tell_abort(running)
                asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self._end_here, running)

    def _end_here(self, running: ServerRequest) -> None:
        """Ends the request with the tokens that have come. Does nothing if the request has ended
        meanwhile.
        """
        if running.ended:
            return
        running.stream.end(self._live.version, _ABORTED)
        self._leave(running)
        self._tell_abort(running)

    def _tell_abort(self, running: ServerRequest) -> None:
        """Tells the server to abort, and does not wait for it. The server notices the closed
        connection at the latest.
        """
        if self._tasks is not None and running.attempt is not None:
            self._tasks.create_task(self._abort_at_server(running.id))

    async def _abort_at_server(self, request_id: str) -> None:
        with suppress(EngineError, OSError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._server.abort(self._client, request_id)

    # --- Pauses -----------------------------------------------------------------------------------

    async def pause(self, mode: types.PauseMode) -> None:
        """Returns when two readings show that the server makes no token. Before that, the mode
        `drain` waits for the requests that the server has, or for `resume`.
        """
        if mode is types.PauseMode.DRAIN:
            self._gate.clear()
            await self._idle.wait()
        async with self._control:
            if mode is types.PauseMode.DRAIN and self._gate.is_set():
                return  # the engine was resumed meanwhile: no caller wants a pause any more
            if mode is types.PauseMode.ABORT and self._held:
                for running in list(self._running):
                    if running.attempt is not None:
                        self._end_here(running)
            elif self._paused is not mode or not self._held:
                await self._pause_server(mode)
        if mode is types.PauseMode.ABORT:
            await self._all_said()
        await self._quiet()

    async def resume(self) -> None:
        async with self._control:
            await self._resume_server()

    async def _pause_server(self, mode: types.PauseMode) -> None:
        """Pauses the server. It counts as paused from the first moment, even if the call fails,
        until `resume`.
        """
        self._gate.clear()
        was_paused = self._paused is not None
        self._held = False
        if was_paused:  # some servers take no second pause
            await self._server.resume(self._client)
        self._paused = mode
        await self._server.pause(self._client, mode_at_server(mode))
        self._held = True

    async def _resume_server(self, *, admit: bool = True) -> None:
        if not self._whole:
            raise EngineError(
                f"resuming engine {self._name!r}: its weights are not whole; stage and commit a "
                "version first."
            )
        if self._asleep:
            raise EngineError(
                f"resuming engine {self._name!r}: it sleeps without its "
                f"{' and '.join(sorted(self._asleep))}; wake it first."
            )
        if self._paused is not None:
            self._held = False
            await self._server.resume(self._client)
            self._paused = None
        if admit:
            self._gate.set()

    async def _all_said(self) -> None:
        """Waits for the last words of the requests that the pause ended, and ends the requests that
        get none.
        """
        at_server = [r for r in self._running if r.attempt is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                for running in at_server:
                    if running.reading is not None:
                        await asyncio.wait({running.reading})
        for running in at_server:
            self._end_here(running)

    async def _quiet(self) -> None:
        """Waits for the end of the server's step, however long it is, and then for two equal
        readings. Raises `PauseIgnored` if it gets none.
        """
        await self._server.settle(self._client)
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_READINGS):
            before = self._num_tokens
            since = loop.time()
            await self._server.settle(self._client)
            seconds = loop.time() - since
            await asyncio.sleep(min(max(seconds, _QUIET_SECONDS), _MOST_QUIET_SECONDS))
            if self._num_tokens == before:
                return
        raise PauseIgnored(
            f"pausing engine {self._name!r}: it says that it is paused and goes on making tokens; "
            "restart it."
        )

    # --- Sleep ------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Implements the port's `Sleeper`. Waits for the server to copy its weights."""
        async with self._control:
            if self._is_asleep:
                return
            if self._paused is None:
                raise EngineError(
                    f"putting engine {self._name!r} to sleep: it generates; pause it first."
                )
            for running in list(self._running):
                self._end_here(running)
            if _ALL_PARTS - self._asleep:
                for part in sorted(self._asleep):  # a server that sleeps in part may not sleep
                    await self._server.wake(self._client, part)
            await self._let_go()
            self._asleep |= _ALL_PARTS
            await self._server.sleep(self._client)
            self._is_asleep = True

    async def wake(self, part: types.MemoryPart) -> None:
        """Implements the port's `Sleeper`. When the last part wakes, the server gets its pause
        again, which it may have ended.
        """
        async with self._control:
            if part not in self._asleep:
                return
            self._is_asleep = False
            if part is types.MemoryPart.KEYS:
                await self._let_go()
            await self._server.wake(self._client, part)
            self._asleep.discard(part)
            if not self._asleep and self._paused is not None:
                await self._server.resume(self._client)
                await self._server.pause(self._client, mode_at_server(self._paused))

    async def _let_go(self) -> None:
        """The weights before the live ones need the memory of the keys, or of the trainer."""
        if self._direct is not None:
            await self._direct.let_go(self._client)

    # --- Weights ----------------------------------------------------------------------------------

    async def stage(self, manifest: types.WeightManifest) -> None:
        """Waits for a worker thread, which the transport feeds, or for the server's own workers.
        The server generates meanwhile.
        """
        async with self._staging:
            self._next = None
            if self._direct is not None:
                same_names = self._area.is_in_files(manifest)
                if await self._direct.opens(self._client, manifest, same_names=same_names):
                    await self._direct.bring(self._client, manifest)
                    self._next = StagedFolder(manifest.version, manifest.fingerprint, None)
                    return
            beside = self._live.folder
            self._next = await asyncio.to_thread(self._area.write, manifest, beside=beside)

    async def commit(self, version: types.Version) -> types.Attestation:
        """Waits for the server to load the staged version. If the caller has made no pause and one
        is needed, the engine makes a pause of its own.
        """
        async with self._control, self._staging:
            if types.MemoryPart.WEIGHTS in self._asleep:
                raise EngineError(
                    f"committing version {version} on engine {self._name!r}: it sleeps without its "
                    "weights; wake it first."
                )
            staged = self._staged(version)
            if staged is self._live:
                return types.Attestation(version, staged.fingerprint)
            own_pause = self._paused is None
            admitted = self._gate.is_set()
            if own_pause:
                mode = self.capabilities.commit_mode
                if staged.folder is not None or mode is not types.PauseMode.KEEP:
                    await self._pause_server(mode or types.PauseMode.KEEP)
            self._gate.clear()
            try:
                await self._load(staged)
                self._next = None
            finally:
                if own_pause and self._whole:
                    await self._resume_server(admit=admitted)
            return types.Attestation(version, staged.fingerprint)

    def _staged(self, version: types.Version) -> StagedFolder:
        """The staged folder of the version. It is the live folder if that is of the version and
        nothing else is staged. Raises `EngineError` if neither is of the version.
        """
        staged = self._next
        live = self._live
        if staged is None and self._whole and live.version == version and live.fingerprint:
            return live
        if staged is None or staged.version != version:
            has = "nothing is staged" if staged is None else f"version {staged.version} is staged"
            raise EngineError(
                f"committing version {version}: {has}. Stage version {version} first."
            )
        return staged

    async def _load(self, staged: StagedFolder) -> None:
        """Loads the staged weights. If they cannot be loaded, it goes back to the weights that were
        live. If that fails too, the weights at the server are not whole.
        """
        self._whole = False
        recomputed = self._paused is types.PauseMode.RECOMPUTE
        try:
            await self._give(staged, recompute=recomputed)
        except EngineError as error:
            await self._give_back(recompute=recomputed)
            self._whole = True
            raise EngineError(f"{error} It serves version {self._live.version} again.") from error
        self._whole = True
        late = 0 if recomputed else self._server.late_labels
        for running in self._running:
            if running.attempt is not None:
                running.attempt.changed(staged.version, recomputed=recomputed, late=late)
        self._live = staged

    async def _give_back(self, *, recompute: bool) -> None:
        """Gives the live weights again, a second time if need be: a server may close the connection
        over which it has said that a load failed.
        """
        try:
            await self._give(self._live, recompute=recompute)
        except EngineUnavailable:
            await self._give(self._live, recompute=recompute)

    async def _give(self, staged: StagedFolder, *, recompute: bool) -> None:
        if staged.folder is not None:
            await self._server.load(
                self._client, staged.folder, staged.version, recompute=recompute
            )
        elif self._direct is not None:
            await self._direct.take(self._client, staged.version, recompute=recompute)

    # --- Health -----------------------------------------------------------------------------------

    async def health(self) -> types.EngineHealth:
        """Asks the server which weights it serves. A server that was restarted without our knowing
        is given the weights it should have.
        """
        if not self._control.locked():
            live, label = await self._asked()
            # The last time that weights were given, that was not finished.
            unfinished = not self._whole and self._paused is None
            is_wrong = label != str(live.version) or unfinished
            if is_wrong and live is self._live and not self._control.locked():
                async with self._control:
                    await self._attach()
        return self.reading()

    async def _asked(self) -> tuple[StagedFolder, str]:
        """The weights that were live when the server was asked, and the label that it gives them.
        Callers that ask meanwhile wait for the same answer, because at a frozen server their
        questions would pile up.
        """
        if self._asking is not None:
            return await asyncio.shield(self._asking)
        asking: asyncio.Future[tuple[StagedFolder, str]]
        asking = asyncio.get_running_loop().create_future()
        self._asking = asking
        try:
            live = self._live
            label = await self._server.label(self._client)
            asking.set_result((live, label))
        finally:
            self._asking = None
            if not asking.done():
                asking.set_exception(
                    self._client.unavailable("did not say which weights it serves")
                )
                asking.exception()  # there may be no other caller that waits
        return asking.result()

    def reading(self) -> types.EngineHealth:
        running = sum(1 for r in self._running if r.attempt is not None)
        decoding = min(running, self._found.capabilities.max_running) if self._found else 0
        return types.EngineHealth(
            version=self._live.version,
            paused=not self._gate.is_set(),
            num_tokens=self._num_tokens,
            num_running=decoding,
            num_waiting=len(self._running) - decoding,
        )

    async def _attach(self) -> None:
        """Makes the server serve the weights that the engine claims to serve. The server's earlier
        state does not matter.
        """
        found = await self._server.attach(self._client)
        check_same_model(found.model, self._area.first, url=self._client.url)
        is_known = self._num_workers is not None and found.num_workers is not None
        if is_known and self._num_workers != found.num_workers:
            raise EngineError(
                f"attaching to {self._client.url}: {found.num_workers} processes compute for this "
                f"server, and engine.servers says {self._num_workers} (tensor x pipeline x data "
                "parallel); start it over as many, or mend engine.servers."
            )
        self._found = found
        if found.label != str(self._live.version) or not self._live.fingerprint:
            await self._give_live_weights(found)
        await self._server.resume(self._client)
        self._whole = True
        if self._paused is None:
            self._gate.set()
        else:
            await self._server.pause(self._client, mode_at_server(self._paused))

    async def _give_live_weights(self, found: ServerDescription) -> None:
        """Gives the server the live weights, in a pause. It gives only a label if the server has
        just started from our model's folder and these weights are still live.
        """
        is_fresh = found.untouched and found.model == str(self._area.first)
        if is_fresh and self._live is self._first:
            await self._server.relabel(self._client, self._live.version)
            return
        _log.info(
            "engine %s serves weights %r of %s: giving it version %d",
            self._name,
            found.label,
            found.model,
            self._live.version,
        )
        self._whole = False
        self._gate.clear()
        await self._server.pause(self._client, types.PauseMode.RECOMPUTE)
        await self._give(self._live, recompute=True)
