"""Runs inside vLLM's and SGLang's workers: a version comes straight from the trainer while the
server generates, and a pause only swaps it in.

Torch and the standard library only, but where differences come: numpy, xxhash and the file that
reads them. A thread meets the trainer in a process group of its own, receives bucket by bucket, and
lays the tensors out as the model has its own, beside those that are served. Every wait has a
deadline, and whatever fails leaves what is served as it is.
"""

import hashlib
import importlib.util
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Ways of computing that keep nothing of a layer's weights but what `exchange` exchanges."""
HEX = 32
"""Digits of a bucket's SHA-256 that are told."""


class GroupSeat:
    """One worker's place in a group of the trainer and all workers that receive."""

    def __init__(self, order, rank):
        self.name = order["group"]
        self.rank = rank
        self._seconds = order["deadline_seconds"]
        within = timedelta(seconds=self._seconds)
        at = (order["host"], order["port"])
        with socket.create_connection(at, timeout=self._seconds) as reached:
            own = reached.getsockname()[0]
        # lives as long as the group, which is made through it
        self._store = TCPStore(*at, timeout=within, wait_for_workers=False)
        named = PrefixStore(self.name, self._store)
        if order["backend"] == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = 3 * within  # its watchdog would end the server
            self._group = ProcessGroupNCCL(named, rank, order["world"], options)
            self._staged = torch.empty(order["bucket_bytes"], dtype=torch.uint8, device="cuda")
        else:
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=own)]
            options._timeout = within
            self._group = ProcessGroupGloo(named, rank, order["world"], options)
            self._staged = None

    def receive(self, part):
        """Fills `part`, at most a bucket, or fails by the deadline; at once when the trainer's
        connection closes.
        """
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if self._staged is None:
            self._group.broadcast([part], options).wait()
            return
        staged = self._staged[: part.numel()]
        work = self._group.broadcast([staged], options)
        late = time.monotonic() + self._seconds
        while not work.is_completed():
            if time.monotonic() > late:
                self._group.abort()
                raise TimeoutError(f"NCCL did not bring a bucket within {self._seconds:g} s")
            time.sleep(0.0005)
        part.copy_(staged)


READER = Path(__file__).resolve().parents[3] / "weights" / "frames.py"
"""Reads differences. Midflight's, and imports nothing of it."""
PIECE = 16 * 2**20
"""Bytes of a tensor that are hashed at once."""
CHECKS = importlib.util.find_spec("xxhash") is not None and READER.exists()
"""Whether differences may come: only whole bytes tell whether they led to the version."""


def fingerprint(tensors, data):
    """As `midflight.models.sizes.fingerprint` has it, where it is explained."""
    import xxhash

    total = hashlib.sha256()
    view = memoryview(data.numpy())
    for name, dtype, shape, offset, num_bytes in sorted(tensors, key=lambda tensor: tensor[0]):
        for start in range(offset, offset + num_bytes, PIECE):
            total.update(
                xxhash.xxh3_128_digest(view[start : min(start + PIECE, offset + num_bytes)])
            )
        total.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode())
    return total.hexdigest()


def change(data, payload, tensors):
    """Changes the bytes of a version by a difference."""
    spec = importlib.util.spec_from_file_location("midflight_frames", READER)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    frames = reader.Frames(memoryview(payload.numpy()))
    view = memoryview(data.numpy())
    for _, dtype, _, offset, num_bytes in tensors:
        frames.apply(view[offset : offset + num_bytes], width=DTYPES[dtype].itemsize)
    frames.end()


class Coming:
    """A version on its way. Written by its own thread alone until `done`."""

    def __init__(self, order):
        self.order = order
        self.digests = []
        self.error = ""
        self.ready = None
        self.done = False


class Landing:
    """What a worker holds: the version that came last, and the one that is served. Its methods
    never wait.
    """

    def __init__(self, prepare, swap):
        """`prepare` makes of named tensors what `swap` takes, which returns what was served before,
        or `None` where that is gone.
        """
        self._prepare = prepare
        self._swap = swap
        self._seat = self._coming = self._live = self._kept = None

    def begin(self, order, *, index, workers):
        """Starts to receive. What came before is forgotten, also where it is still on its way: its
        thread ends by its deadline.
        """
        if order["workers"] != workers:
            raise ValueError(
                f"this server has {workers} workers, and the order is for {order['workers']}"
            )
        before = [self._coming]
        self._coming = Coming(order)
        given = (self._coming, order["rank"] + index, before)
        threading.Thread(
            target=self._receive, args=given, name="midflight-direct", daemon=True
        ).start()

    def state(self):
        """For the companion: `done` also where it failed."""
        coming = self._coming
        kept = self._kept
        held = (kept[0] if kept else "") if CHECKS else None
        if coming is None:
            return {
                "version": None,
                "done": True,
                "digests": [],
                "error": "nothing was ordered",
                "live": self._live,
                "held": held,
            }
        said = {
            "version": coming.order["version"],
            "done": coming.done,
            "digests": coming.digests,
            "error": coming.error,
        }
        return {**said, "live": self._live, "held": held}

    def holds(self, version):
        coming = self._coming
        has = (
            coming is not None
            and coming.done
            and coming.ready is not None
            and coming.order["version"] == version
        )
        return has or self._live == version

    def take(self, version):
        """Between two steps: what was received becomes what is served, and the other way round, so
        that it can be taken back.
        """
        coming = self._coming
        if not self.holds(version):
            raise ValueError(
                f"version {version} is not here; here are {coming and coming.order['version']}, "
                f"and {self._live} is served"
            )
        if coming is not None and coming.ready is not None and coming.order["version"] == version:
            coming.ready = self._swap(coming.ready)
            coming.order = {**coming.order, "version": self._live}
            self._live = version

    def _receive(self, coming, rank, before):
        """In its thread. Lets go of what came before first: to give much memory back takes time."""
        before.clear()
        try:
            order = coming.order
            # a round that fails leaves no group
            seat = self._seat
            self._seat = None
            if order["again"] and (seat is None or seat.name != order["group"]):
                raise ValueError(f"this worker was never in group {order['group']}")
            seat = seat if order["again"] else GroupSeat(order, rank)
            data = torch.empty(order["num_bytes"], dtype=torch.uint8)
            for start in range(0, len(data), order["bucket_bytes"]):
                part = data[start : start + order["bucket_bytes"]]
                seat.receive(part)
                coming.digests.append(hashlib.sha256(part.numpy()).hexdigest()[:HEX])
            self._seat = seat
            if order["base"]:
                data = self._changed(data, order)
            if order["keeps"]:
                self._keep(data, order)
            if order["serves"]:
                with torch.no_grad():
                    coming.ready = self._prepare(
                        [(name, _view(data, *where)) for name, *where in order["tensors"]]
                    )
        except Exception as error:
            coming.error = f"{type(error).__name__}: {error}".partition("\n")[0]
        coming.done = True

    def _changed(self, payload, order):
        """Nothing is kept until it is verified: a difference that fails leaves neither version."""
        kept = self._kept
        self._kept = None
        if kept is None or kept[0] != order["base"]:
            raise ValueError("the version that this is a difference from is not here")
        change(kept[1], payload, order["tensors"])
        return kept[1]

    def _keep(self, data, order):
        self._kept = None
        if (found := fingerprint(order["tensors"], data)) != order["fingerprint"]:
            raise ValueError(
                f"what came hashes to {found[:12]} and not to {order['fingerprint'][:12]}"
            )
        self._kept = (found, data)


def _view(data, dtype, shape, offset, num_bytes):
    return data[offset : offset + num_bytes].view(DTYPES[dtype]).view(shape)


# --- A model beside the one that is served --------------------------------------------------------


def can_stand_beside(model):
    """Whether a model's weights may be made ready in other memory and exchanged: on a GPU, recorded
    graphs hold the old addresses, and what packs its weights keeps them in places of its own."""
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return False
    methods = {
        type(m.quant_method).__name__
        for m in model.modules()
        if getattr(m, "quant_method", None) is not None
    }
    return methods <= PLAIN and not any(
        getattr(m, "use_intel_amx_backend", False) for m in model.modules()
    )


def beside(model):
    """The same modules around parameters and buffers of their own. Loaders stay those of the model
    that is served, so that what is exchanged holds nothing alive."""
    modules = {}
    tensors = {}

    def tensor(old):
        if old is not None and id(old) not in tensors:
            new = torch.empty_like(old.data) if isinstance(old, nn.Parameter) else old.data.clone()
            new.__class__ = old.__class__
            new.__dict__.update(old.__dict__)
            tensors[id(old)] = new
        return None if old is None else tensors[id(old)]

    def module(old):
        if id(old) not in modules:
            new = modules[id(old)] = object.__new__(type(old))
            vars(new).update(vars(old))
            vars(new)["_parameters"] = {name: tensor(p) for name, p in old._parameters.items()}
            vars(new)["_buffers"] = {name: tensor(b) for name, b in old._buffers.items()}
            vars(new)["_non_persistent_buffers_set"] = set(old._non_persistent_buffers_set)
            vars(new)["_modules"] = {name: m and module(m) for name, m in old._modules.items()}
        return modules[id(old)]

    made = module(model)
    # a function that calls itself is kept until the collector comes, with all that it knows
    modules.clear()
    tensors.clear()
    return made


EXCHANGED = ("_parameters", "_buffers", "cpu_linear", "_cpu_unpacked_conv_weight")
"""The last two are vLLM's: on a CPU a layer computes with a packed copy of its weight, which the
first holds, or keeps one that is not.
"""


def exchange(model, other):
    """Each has what the other had. No byte is copied."""
    for ours, theirs in zip(model.modules(), other.modules(), strict=True):
        a = vars(ours)
        b = vars(theirs)
        for name in EXCHANGED:
            if name in a:
                a[name], b[name] = b[name], a[name]
    return other
