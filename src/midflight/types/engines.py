"""Engines and the weights that they serve."""

from dataclasses import dataclass, field
from typing import Literal

from midflight.types.names import Feature, LogprobKind, PauseMode, Version


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of an engine. The gateway and the handover decide by them, and never by the
    engine's name.
    """

    pause_modes: frozenset[PauseMode]
    logprob_kind: LogprobKind
    honours_seed: bool
    """True if the same seed gives the same tokens, whatever the batch and the interruptions."""
    versions_per_token: bool
    stops_on_strings: bool
    aborts_single_requests: bool
    stages_weights: bool
    """True if weights can be brought in while decoding goes on, and committed later."""
    max_context: int
    vocab_size: int
    max_running: int
    """The most requests that are decoded together. More requests wait inside the engine."""
    max_keys: int | None = None
    """The most tokens, over all requests, whose keys and values it can keep. It is None if each of
    `max_running` requests may fill the context.
    """
    features: frozenset[Feature] = frozenset()
    side_by_side: bool = False
    """True if it keeps several versions, and a request goes on with the version that it began with.
    Then a commit affects only new requests, and pauses nothing.
    """
    commit_mode: PauseMode | None = None
    """The effect of a commit on requests in flight if the engine is not paused. It is the engine's
    best way to change weights; `None` means `keep`.

    A server that names `keep` swaps the weights that its workers received directly between two
    steps, without a pause."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A reading of an engine. It measures progress, not liveness: two readings with work and equal
    `num_tokens` show a stall.
    """

    version: Version
    paused: bool
    num_tokens: int
    """Output tokens since the engine started."""
    num_running: int
    num_waiting: int
    num_computed: int = 0
    """Tokens of prompts and answers that went through the model. Only the embedded engine reports
    it.
    """
    num_reused: int = 0
    """Tokens of prompts that did not go through the model, because another request had computed
    them. Only the embedded engine reports it.
    """


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The place of one tensor in a packed buffer. `dtype` is a safetensors name (F32, BF16, ...);
    offsets are in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A difference between two versions. Its bytes turn the weights of `base` into those of the
    next difference's base, or of the manifest itself.
    """

    base: Version
    base_fingerprint: str
    """The fingerprint of the whole weights that it is applied to, as
    `WeightManifest.fingerprint`.
    """
    location: str
    """The location of the payload, in the manifest's transport."""
    payload: TensorSpec
    """One tensor of bytes (U8) with the differences of all tensors, in the manifest's order."""
    payload_fingerprint: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A published version: the location of its bytes, and their fingerprint. Names are checkpoint
    names.

    Without `deltas` the bytes at `location` are those of this version. With them they are those of
    `deltas[0].base`, and the differences, applied one after the other, lead from there to this
    version. So an engine that has any version on the way, or none, can get to it.
    """

    version: Version
    fingerprint: str
    """The fingerprint of names, dtypes, shapes and bytes (`models.sizes`). The weights that an
    engine serves are compared with it (I7).
    """
    transport: str
    """`shared_memory` (location: path of a mapped file), `file` (path of a safetensors file that a
    foreign trainer has written), `direct` (tcp://host:port/secret), or `pull`
    (http://host:port/secret of each trainer rank, with blanks between).
    """
    location: str
    tensors: tuple[TensorSpec, ...]
    deltas: tuple[Delta, ...] = ()
    receivers: int | None = None
    """The number of engines that are told to receive it at this moment, if it is known. A broadcast
    need not wait for more.
    """


@dataclass(frozen=True, slots=True)
class Attestation:
    """An engine's statement which version and fingerprint it serves after a commit."""

    version: Version
    fingerprint: str
    still_seconds: float | None = field(default=None, compare=False)
    """How long the engine made no token for the commit, if it made tokens until then and knows."""


Meeting = Literal["plugin", "torch", "nccl_id"]
"""How a server's workers come to a group with the trainer: our plugin through a store, the server's
own engine as `torch.distributed` names the keys of a store, or by NCCL's unique id.
"""


@dataclass(frozen=True, slots=True)
class BucketHandle:
    """A bucket of the trainer, as a worker on the same machine needs it to open it (CUDA IPC)."""

    handle: str
    """The driver's handle, in hex."""
    device: str
    """The device that has the bucket, by a name that is the same in all processes."""
    machine: str


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """An order to a server's workers to receive a version directly. They meet in `group`, through
    the store at `host` and `port`.
    """

    version: Version
    group: str
    again: bool
    """True if the workers are in that group already."""
    host: str
    port: int
    rank: int
    """The rank of the first worker; the others follow."""
    workers: int
    world: int
    """The number of members of the group: the trainer, and the workers of all servers."""
    backend: str
    bucket_bytes: int
    deadline_seconds: float
    """The deadline for making the group, and for each bucket."""
    num_bytes: int
    tensors: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """Name, safetensors dtype, shape, offset and bytes of each tensor of the version, even if only
    a difference is sent.
    """
    fingerprint: str
    """The fingerprint of the weights that the worker then has."""
    base: str = ""
    """The fingerprint of the weights that the difference changes. Empty if no
    difference is sent.
    """
    keeps: bool = False
    """True if the worker must keep the bytes, because differences will change them."""
    serves: bool = True
    """True if the weights are loaded to be served. A version that is only a step to another one is
    not.
    """
    on_device: bool = False
    """True if the bytes go from the trainer's device to those of the workers, and are hashed there.
    Otherwise they are in host memory at both ends.
    """
    nccl_id: str = ""
    """NCCL's unique id of the group in base64, if the workers meet by that."""
    buckets: tuple[tuple[str, ...], ...] = ()
    """The names of the tensors of each bucket, if a server's own engine takes whole tensors."""
    bucket: BucketHandle | None = None
    """The trainer's bucket, if the workers read it on its device. They meet by a socket then, at
    `host` and `port`.
    """


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of one worker of a server."""

    version: Version | None
    """The version of its last order; None if it never got one."""
    done: bool
    """True if it has received and loaded the whole version, or has given up."""
    digests: tuple[str, ...]
    """The digests of the buckets that it has received."""
    error: str
    live: Version | None
    """The version that it serves, if it received that version directly."""
    held: str | None = ""
    """The fingerprint of the bytes that a difference may change. It is empty if it holds none, and
    None if it cannot check the result of a difference.
    """
    arrived: tuple[str, ...] = ()
    """The digests of the buckets that the server's own transfer engine has received since its last
    update began.
    """
    keeps: bool = False
    """True if it keeps the weights that are served while the server's own engine brings others, so
    that they can be taken back.
    """
    stages: bool = False
    """True if the server's own engine can bring others beside them while it generates: the device
    has room.
    """
