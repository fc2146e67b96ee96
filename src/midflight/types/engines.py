"""Engines and the weights they serve."""

from dataclasses import dataclass

from midflight.types.names import Feature, LogprobKind, PauseMode, Version


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; the gateway and the handover ask here and never by the engine's
    name.
    """

    pause_modes: frozenset[PauseMode]
    logprob_kind: LogprobKind
    honours_seed: bool
    """The same seed gives the same tokens, whatever the batch and the interruptions."""
    versions_per_token: bool
    stops_on_strings: bool
    aborts_single_requests: bool
    stages_weights: bool
    """Weights can be brought in while decoding goes on, and committed later."""
    max_context: int
    vocab_size: int
    max_running: int
    """Requests decoded together; more wait inside the engine."""
    max_keys: int | None = None
    """Tokens that it has room to keep keys and values of, all requests together; none where every
    one of `max_running` may fill the context.
    """
    features: frozenset[Feature] = frozenset()
    side_by_side: bool = False
    """It keeps several versions, and a request goes on with the one that it began with: a commit is
    of new requests alone, and pauses nothing.
    """
    commit_mode: PauseMode | None = None
    """What a commit is to requests in flight where nobody paused the engine, if that is not `keep`.
    It is how it changes weights best.

    A server that names `keep` swaps between two steps what came straight to its workers, without a
    pause."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A reading of an engine. Progress, not liveness: two readings with work and equal `num_tokens`
    show a stall.
    """

    version: Version
    paused: bool
    num_tokens: int
    """Output tokens since the engine started."""
    num_running: int
    num_waiting: int
    num_computed: int = 0
    """Tokens that went through the model, prompts and answers; of the embedded engine."""
    num_reused: int = 0
    """Tokens of prompts that did not, because they had in another request; of the embedded
    engine.
    """


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies in a packed buffer. `dtype` is a safetensors name (F32, BF16, ...);
    offsets are in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A difference: bytes that turn the weights it names into those of the next difference's base,
    or of the manifest itself.
    """

    base: Version
    base_fingerprint: str
    """Of the whole weights that it is applied to, as `WeightManifest.fingerprint`."""
    location: str
    """Of the payload, in the manifest's transport."""
    payload: TensorSpec
    """One tensor of bytes (U8): differences of all tensors, in the manifest's order."""
    payload_fingerprint: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A published version: where its bytes are and what they must hash to. Names are checkpoint
    names.

    Without `deltas` the bytes at `location` are the version's. With them they are those of
    `deltas[0].base`, and the differences, applied one after the other, lead from there to this
    version: so an engine that has any version on the way, or none, gets to it.
    """

    version: Version
    fingerprint: str
    """Of names, dtypes, shapes and bytes: `models.sizes`. What an engine serves is compared with it
    (I7).
    """
    transport: str
    """`shared_memory` (location: path of a mapped file), `file` (path of a safetensors file),
    `collective` or `direct` (tcp://host:port/secret), or `pull` (http://host:port/secret of each
    trainer rank, with blanks between)."""
    location: str
    tensors: tuple[TensorSpec, ...]
    deltas: tuple[Delta, ...] = ()
    receivers: int | None = None
    """How many engines are told to take it in at this moment, where whoever tells them knows: a
    broadcast need not wait for more.
    """


@dataclass(frozen=True, slots=True)
class Attestation:
    """What an engine says it serves after a commit."""

    version: Version
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """What a server's workers are told of a version that comes straight to them. They meet in
    `group`, through the store at `host` and `port`.
    """

    version: Version
    group: str
    again: bool
    """They are in that group already."""
    host: str
    port: int
    rank: int
    """Of the first worker; the others follow."""
    workers: int
    world: int
    """Members of the group: the trainer, and the workers of all servers."""
    backend: str
    bucket_bytes: int
    deadline_seconds: float
    """For making the group, and for each bucket."""
    num_bytes: int
    tensors: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """Name, safetensors dtype, shape, offset, bytes: of the version, also where a difference
    comes.
    """
    fingerprint: str
    """Of what the worker then has."""
    base: str = ""
    """Where a difference comes: the fingerprint of what it changes."""
    keeps: bool = False
    """The worker is to keep the bytes, because differences will change them."""
    serves: bool = True
    """It is laid out to be served; a version on the way to one is not."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What one worker of a server says of itself."""

    version: Version | None
    """Ordered last; of a worker that was never given an order, none."""
    done: bool
    """It has received it whole and laid it out, or has given up."""
    digests: tuple[str, ...]
    """Of the buckets that came."""
    error: str
    live: Version | None
    """What it serves, where that came straight to it."""
    held: str | None = ""
    """Fingerprint of the bytes that a difference may change, if it has any; none where it cannot
    check what comes of it.
    """
