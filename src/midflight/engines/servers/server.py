"""What a kind of inference server is to us: its wire, as a Protocol. `vllm.py` and `sglang.py` implement it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from midflight.engines.servers.http import ServerClient
from midflight.errors import EngineError, ModelNotFound
from midflight.models.sizes import ModelSizes, sizes_of
from midflight.types import Capabilities, Finish, FinishReason, GenerateRequest, PauseMode, Version


@dataclass(frozen=True, slots=True)
class EventTokens:
    """The tokens of one event of a stream, and what came with them."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token, where asked for: the likeliest (id, log-probability), likeliest first."""
    finish: Finish | None = None
    spans: tuple[tuple[str, int, int], ...] = ()
    """On the last piece: (label of the weights, first token, one past the last), over all tokens of the request."""


class EventReader(Protocol):
    """Reads the events of one request, in order."""

    def read(self, event: bytes) -> EventTokens:
        """`EngineUnavailable` where it is nonsense, or the server's own error."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What a server said of itself when it was attached."""

    capabilities: Capabilities
    label: str
    """Of the weights it serves; a version of ours where it is a number."""
    model: str
    """The folder that it says its weights are from."""

    @property
    def untouched(self) -> bool:
        """Whether its weights have not been labelled since it started."""
        return self.label == UNLABELLED


UNLABELLED = "default"
"""How vLLM and SGLang call the weights they start with."""


class Server(Protocol):
    """One server. Calls wait for its answers, within their caller's deadline; an answer that is missing is `EngineUnavailable`."""

    @property
    def late_labels(self) -> int:
        """Tokens after a change of weights in `keep` that its account of versions may give to the new ones wrongly."""
        ...

    async def attach(self, client: ServerClient) -> Found:
        """Ends a pause that was left, and asks the server what it is and can. `EngineError` names what is wrong with it: another kind, too old, started without what we need."""
        ...

    async def label(self, client: ServerClient) -> str:
        """Of the weights it serves; an answer also says that it lives, paused or not."""
        ...

    async def relabel(self, client: ServerClient, version: Version) -> None: ...

    def body(self, request: GenerateRequest, *, request_id: str, ends: tuple[int, ...], salt: str) -> tuple[str, dict[str, object]]:
        """Path and JSON body of a streamed generation; `ends` are the token ids that end it, `salt` parts prefix caches by version."""
        ...

    def reader(self, request: GenerateRequest) -> EventReader: ...

    async def abort(self, client: ServerClient, request_id: str) -> None: ...

    async def pause(self, client: ServerClient, mode: PauseMode) -> None:
        """Keep, recompute or abort; returns when no token is made. Not called while it is paused."""
        ...

    async def resume(self, client: ServerClient) -> None:
        """Idempotent."""
        ...

    async def load(self, client: ServerClient, folder: Path, version: Version, *, recompute: bool) -> None:
        """In a pause: makes the weights of a model folder live, and labels them. Where it fails they may be of both.

        `recompute`: the pause is of that mode, so no key of the old weights may be used again.
        """
        ...


def cut(piece: EventTokens, *, ends: tuple[int, ...], start: int, min_tokens: int) -> EventTokens:
    """The piece up to the first token that ends the answer, where the server went on; `start` output tokens came before it."""
    for i, token in enumerate(piece.token_ids):
        if token in ends and start + i + 1 > min_tokens:
            return replace(
                piece,
                token_ids=piece.token_ids[: i + 1],
                logprobs=piece.logprobs[: i + 1],
                top_logprobs=piece.top_logprobs[: i + 1],
                finish=Finish(FinishReason.STOP, token),
            )
    return piece


def mode_at_server(mode: PauseMode) -> PauseMode:
    """Of those that `Server.pause` knows: what is drained has nothing left to lose."""
    return PauseMode.KEEP if mode is PauseMode.DRAIN else mode


_OF_THE_SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


def check_same_model(theirs: str, ours: Path, *, url: str) -> None:
    """`EngineError` where they certainly differ: our weights would not fit, and a token id outside its vocabulary kills SGLang."""
    found, wanted = _sizes(Path(theirs)), _sizes(ours)
    if found is None or wanted is None:
        return
    for name in _OF_THE_SHAPES:
        if getattr(found, name) != getattr(wanted, name):
            raise EngineError(
                f"attaching to {url}: it serves {theirs!r}, whose {name} is {getattr(found, name)}, and {str(ours)!r} has "
                f"{getattr(wanted, name)}; start the server with the same model, or give its model to Midflight (--model, model.path)."
            )


def _sizes(folder: Path) -> ModelSizes | None:
    """`None` where it cannot be read: on another machine, or named as a repository."""
    try:
        return sizes_of(folder) if folder.is_absolute() else None
    except (ModelNotFound, OSError):
        return None
