"""Runs inside vLLM's and SGLang's workers: a version comes straight from the trainer while the
server generates, and a pause only swaps it in.

This file imports torch and the standard library only. If differences come, it also imports numpy,
xxhash and the file that reads them. A thread meets the trainer in a process group of its own,
receives bucket by bucket, and lays the tensors out as the model has its own, beside those that are
served. Every wait has a deadline, and every failure leaves the weights served as they are.
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
"""Ways of computing that keep nothing of a layer's weights outside the attributes that `exchange`
exchanges.
"""
HEX = 32
"""The number of digits of a bucket's SHA-256 that are reported."""


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
        # The store lives as long as the group, which is made through it.
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
        """Fills `part`, at most a bucket, or fails by the deadline. It fails at once when the
        trainer's connection closes.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
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


READER = Path(__file__).resolve().parents[3] / "weights" / "difference_codec.py"
"""The file of Midflight that reads differences. It imports nothing of Midflight."""
PIECE = 16 * 2**20
"""Bytes of a tensor that are hashed at once."""
CHECKS = importlib.util.find_spec("xxhash") is not None and READER.exists()
"""True if differences may come. Only a digest of all bytes tells whether they led to
the version.
"""


def fingerprint(tensors, data):
    """The same as `midflight.models.sizes.fingerprint`, where it is explained."""
    import xxhash

    total = hashlib.sha256()
    view = memoryview(data.numpy())
    for name, dtype, shape, offset, num_bytes in sorted(tensors, key=lambda tensor: tensor[0]):
        end = offset + num_bytes
        for start in range(offset, end, PIECE):
            piece = view[start : min(start + PIECE, end)]
            total.update(xxhash.xxh3_128_digest(piece))
        sizes = ",".join(map(str, shape))
        total.update(f"{name}\0{dtype}\0{sizes}\0".encode())
    return total.hexdigest()


def change(data, payload, tensors):
    """Changes the bytes of a version by a difference."""
    spec = importlib.util.spec_from_file_location("midflight_difference_codec", READER)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    frames = reader.Frames(memoryview(payload.numpy()))
    view = memoryview(data.numpy())
    for _, dtype, _, offset, num_bytes in tensors:
        frames.apply(view[offset : offset + num_bytes], width=DTYPES[dtype].itemsize)
    frames.end()


class IncomingVersion:
    """A version on its way. Only its own thread writes to it until `done`."""

    def __init__(self, order):
        self.order = order
        self.digests = []
        self.error = ""
        self.ready = None
        self.done = False


class DoubleBuffer:
    """The versions that a worker holds: the one that came last, and the one that is served. Its
    methods never wait.
    """

    def __init__(self, prepare, swap):
        """`prepare` turns named tensors into the argument of `swap`. `swap` returns the weights
        that were served before, or `None` if they are gone.
        """
        self._prepare = prepare
        self._swap = swap
        self._seat = None
        self._coming = None
        self._live = None  # the version that is served
        self._kept = None  # (fingerprint, bytes) of the version that differences change

    def begin(self, order, *, index, workers):
        """Starts to receive. The version that came before is forgotten, even if it is still on its
        way: its thread ends by its deadline.
        """
        if order["workers"] != workers:
            raise ValueError(
                f"this server has {workers} workers, and the order is for {order['workers']}"
            )
        before = [self._coming]
        self._coming = IncomingVersion(order)
        given = (self._coming, order["rank"] + index, before)
        thread = threading.Thread(
            target=self._receive, args=given, name="midflight-direct", daemon=True
        )
        thread.start()

    def state(self):
        """The state of this worker, for the companion. `done` is true also after a failure."""
        coming = self._coming
        kept = self._kept
        if not CHECKS:
            held = None
        elif kept is None:
            held = ""
        else:
            held = kept[0]
        if coming is None:
            return {
                "version": None,
                "done": True,
                "digests": [],
                "error": "nothing was ordered",
                "live": self._live,
                "held": held,
            }
        return {
            "version": coming.order["version"],
            "done": coming.done,
            "digests": coming.digests,
            "error": coming.error,
            "live": self._live,
            "held": held,
        }

    def holds(self, version):
        """True if the version is served, or has come and is ready."""
        if self._live == version:
            return True
        coming = self._coming
        if coming is None or not coming.done or coming.ready is None:
            return False
        return coming.order["version"] == version

    def take(self, version):
        """Serves the version that was received, between two steps. The version that was served
        becomes the received one, so that the exchange can be taken back.
        """
        coming = self._coming
        if not self.holds(version):
            here = None if coming is None else coming.order["version"]
            raise ValueError(
                f"version {version} is not here; here are {here}, and {self._live} is served"
            )
        if coming is None or coming.ready is None or coming.order["version"] != version:
            return
        coming.ready = self._swap(coming.ready)
        coming.order = {**coming.order, "version": self._live}
        self._live = version

    def _receive(self, coming, rank, before):
        """Receives a version, in a thread of its own. It first lets go of the version before,
        because giving much memory back takes time.
        """
        before.clear()
        try:
            order = coming.order
            # A round that fails leaves no group.
            seat = self._seat
            self._seat = None
            if order["again"]:
                if seat is None or seat.name != order["group"]:
                    raise ValueError(f"this worker was never in group {order['group']}")
            else:
                seat = GroupSeat(order, rank)
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
                views = [(name, _view(data, *where)) for name, *where in order["tensors"]]
                with torch.no_grad():
                    coming.ready = self._prepare(views)
        except Exception as error:
            coming.error = f"{type(error).__name__}: {error}".partition("\n")[0]
        coming.done = True

    def _changed(self, payload, order):
        """Returns the bytes of the version that a difference leads to. Nothing is kept until it is
        verified: a difference that fails leaves neither version.
        """
        kept = self._kept
        self._kept = None
        if kept is None or kept[0] != order["base"]:
            raise ValueError("the version that this is a difference from is not here")
        change(kept[1], payload, order["tensors"])
        return kept[1]

    def _keep(self, data, order):
        self._kept = None
        found = fingerprint(order["tensors"], data)
        if found != order["fingerprint"]:
            raise ValueError(
                f"what came hashes to {found[:12]} and not to {order['fingerprint'][:12]}"
            )
        self._kept = (found, data)


def _view(data, dtype, shape, offset, num_bytes):
    return data[offset : offset + num_bytes].view(DTYPES[dtype]).view(shape)


# --- A model beside the one that is served --------------------------------------------------------


def can_stand_beside(model):
    """True if a model's weights may be made ready in other memory and exchanged. They may not on a
    GPU, where recorded graphs hold the old addresses, nor if layers pack their weights and keep
    them in places of their own.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN:
            return False
        if getattr(module, "use_intel_amx_backend", False):
            return False
    return True


def beside(model):
    """The same modules around parameters and buffers of their own. The loaders are those of the
    served model, so that exchanged tensors keep nothing else alive.
    """
    modules = {}
    tensors = {}

    def tensor(old):
        if old is None:
            return None
        if id(old) not in tensors:
            new = torch.empty_like(old.data) if isinstance(old, nn.Parameter) else old.data.clone()
            new.__class__ = old.__class__
            new.__dict__.update(old.__dict__)
            tensors[id(old)] = new
        return tensors[id(old)]

    def module(old):
        if old is None:
            return None
        if id(old) not in modules:
            new = object.__new__(type(old))
            modules[id(old)] = new
            vars(new).update(vars(old))
            vars(new)["_parameters"] = {name: tensor(p) for name, p in old._parameters.items()}
            vars(new)["_buffers"] = {name: tensor(b) for name, b in old._buffers.items()}
            vars(new)["_non_persistent_buffers_set"] = set(old._non_persistent_buffers_set)
            vars(new)["_modules"] = {name: module(m) for name, m in old._modules.items()}
        return modules[id(old)]

    made = module(model)
    # A function that calls itself is kept until the collector comes, with all that it refers to.
    modules.clear()
    tensors.clear()
    return made


EXCHANGED = ("_parameters", "_buffers", "cpu_linear", "_cpu_unpacked_conv_weight")
"""The attributes that `exchange` exchanges. The last two are vLLM's: on a CPU a layer computes with
a packed copy of its weight, which `cpu_linear` holds, or keeps one that is not packed.
"""


def exchange(model, other):
    """Exchanges the weights of two models. No byte is copied."""
    for ours, theirs in zip(model.modules(), other.modules(), strict=True):
        a = vars(ours)
        b = vars(theirs)
        for name in EXCHANGED:
            if name in a:
                a[name], b[name] = b[name], a[name]
    return other
