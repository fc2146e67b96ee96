"""Runs inside vLLM's and SGLang's workers: a version comes straight from the trainer while the
server generates, and a pause only swaps it in.

This file imports torch and the standard library only. If differences come, it also imports numpy,
xxhash and the file that reads them. A thread meets the trainer in a process group of its own,
receives bucket by bucket, and lays each tensor out as the model has its own, beside those that are
served: of a layer that is shared by several workers, each keeps its share. Every wait has a
deadline, and every failure leaves the weights served as they are.

If trainer and workers are on GPUs, buckets go from one to the other, and are hashed there. By NCCL
that is untested.
"""

import hashlib
import importlib.util
import json
import socket
import sys
import threading
import time
from collections import deque
from contextlib import closing, contextmanager
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
CPU = torch.device("cpu")
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
        self._polls = order["backend"] == "nccl"
        if self._polls:
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = 3 * within  # its watchdog would end the server
            self._group = ProcessGroupNCCL(named, rank, order["world"], options)
        else:
            options = ProcessGroupGloo._Options()
            options._devices = [ProcessGroupGloo.create_device(hostname=own)]
            options._timeout = within
            self._group = ProcessGroupGloo(named, rank, order["world"], options)

    def receive(self, part):
        """Fills `part`, at most a bucket, or fails by the deadline. It fails at once when the
        trainer's connection closes. NCCL takes parts on a GPU only.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        if not self._polls:
            # No name for the work: a traceback would keep it, and with it the connections.
            self._group.broadcast([part], options).wait()
            return
        work = self._group.broadcast([part], options)
        late = time.monotonic() + self._seconds
        while not work.is_completed():
            if time.monotonic() > late:
                self._group.abort()
                raise TimeoutError(f"NCCL did not bring a bucket within {self._seconds:g} s")
            time.sleep(0.0005)
        work.wait()


class HandleSeat:
    """One worker's place in a group that reads the trainer's bucket on its device (CUDA IPC). The
    trainer says when a part is there, and the worker when it has read it.
    """

    def __init__(self, order, rank, device):
        self._left = order["num_bytes"]
        at = (order["host"], order["port"])
        self._trainer = socket.create_connection(at, timeout=order["deadline_seconds"])
        told = {"group": order["group"], "rank": rank}
        try:
            self._bucket = open_bucket(order["bucket"], device)
        except Exception as error:
            self._say({**told, "refused": str(error)})
            self._trainer.close()
            raise
        self._say(told)

    def receive(self, part):
        """Fills `part`, at most a bucket, or fails by the deadline. It fails at once when the
        trainer's connection closes. With the last part the bucket is closed.
        """
        length = b""
        while len(length) < LENGTH_BYTES:
            came = self._trainer.recv(LENGTH_BYTES - len(length))
            if not came:
                raise ConnectionError("the trainer has ended the transfer")
            length += came
        if int.from_bytes(length, "little") != len(part):
            raise ValueError(f"the trainer gives {length.hex()} bytes, and {len(part)} are due")
        self._bucket.read(part)
        self._trainer.sendall(READ)
        self._left -= len(part)
        if not self._left:
            self.close()

    def close(self):
        """Closes the bucket, and then the connection, by which the trainer knows that."""
        if self._bucket is not None:
            self._bucket.close()
            self._bucket = None
        self._trainer.close()

    def _say(self, told):
        self._trainer.sendall(json.dumps(told).encode() + b"\n")


READ = b"\1"
LENGTH_BYTES = 8
"""The words of `midflight.weights.transports.handle_group`, where they are explained."""


def open_bucket(told, device):
    """The trainer's bucket, read from `device`. Raises an error whose text is the reason if it cannot
    be opened.
    """
    handles = module_of(HANDLES)
    own = handles.device_name(device)
    if told["machine"] != handles.machine():
        raise ValueError(f"the trainer's {told['device']} is on another machine than {own}")
    try:
        return handles.opened_bucket(told["handle"], device)
    except handles.HandleRefused as why:
        raise ValueError(
            f"{own} cannot read memory of the trainer's {told['device']}: {why}"
        ) from why


@contextmanager
def working_on(device):
    """Makes the device that of this thread, which begins with the first one. Work in the block runs
    beside that of the other threads, and has ended with it.
    """
    if str(device) == device.type:  # it has no number
        yield
        return
    module = torch.get_device_module(device)
    module.set_device(device)
    if not hasattr(module, "Stream"):
        yield
        return
    own = module.Stream(device)
    with module.stream(own):
        yield
    own.synchronize()


USUAL_SWITCH = sys.getswitchinterval()
"""The most seconds for which a thread keeps the interpreter from others."""
QUICK_SWITCH = 1e-4


@contextmanager
def quickly_served():
    """Lets threads take turns more often in the block. SGLang looks for requests without a pause, and
    a version takes hundreds of short steps beside it: each would wait 5 ms for the interpreter.
    """
    sys.setswitchinterval(QUICK_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(USUAL_SWITCH)


WEIGHTS = Path(__file__).resolve().parents[3] / "weights"
READER = WEIGHTS / "difference_codec.py"
"""The file of Midflight that reads differences. It imports nothing of Midflight."""
DIGESTS = WEIGHTS / "device_digest.py"
"""The file that hashes bytes on a device. It imports torch only."""
HANDLES = WEIGHTS / "device_handles.py"
"""The file that opens memory of another process on a device. It imports torch only."""
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


def module_of(path):
    """The module in a file of Midflight, which this interpreter cannot import by name."""
    spec = importlib.util.spec_from_file_location(f"midflight_{path.stem}", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def change(data, payload, tensors):
    """Changes the bytes of a version by a difference."""
    reader = module_of(READER)
    frames = reader.Frames(memoryview(payload.numpy()))
    view = memoryview(data.numpy())
    for _, dtype, _, offset, num_bytes in tensors:
        frames.apply(view[offset : offset + num_bytes], width=DTYPES[dtype].itemsize)
    frames.end()


def sha256(part):
    return hashlib.sha256(part.numpy()).hexdigest()[:HEX]


class OnHost:
    """Hashes buckets in host memory, while they are in the cache."""

    def __init__(self):
        self._found = []

    def add(self, part):
        self._found.append(sha256(part))

    def digests(self):
        return self._found


class OnDevice:
    """Hashes buckets on a device, whose digests come to the host together at the end."""

    def __init__(self):
        self._hasher = module_of(DIGESTS)
        self._found = []
        self._lengths = []

    def add(self, part):
        self._found.append(self._hasher.lanes(part))
        self._lengths.append(len(part))

    def digests(self):
        return self._hasher.digests(self._found, self._lengths)


def hashes(device):
    return OnHost() if device.type == "cpu" else OnDevice()


def bytes_of(tensors):
    """The bytes of tensors, one after the other, on their device."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class OwnUpdate:
    """Watches an update by the server's own transfer engine for our plugin. It hashes what arrives,
    and keeps the weights that were served before, so that the update can be taken back.
    """

    def __init__(self, model):
        self._model = model
        self._device = device_of(model)
        self._arrived = hashes(self._device)
        self._copies = {}
        self._is_beside = True
        self._places = []
        self.beside = None
        """The model beside the served one: the update that comes, or what was served before it."""
        self.kept = None
        """The label of the weights that can be served again."""
        self.can_keep = keeps_nothing_else(model)
        """True if a layer's weights lie in its parameters and buffers alone."""
        self.can_stage = self.can_keep and has_room_beside(model)
        """True if an update may come beside the served weights. It is found out once, because what
        came or was served before stays beside from then on.
        """

    @torch.no_grad()
    def begin(self, label):
        """Keeps the weights that are served: on their device if it has room, and otherwise in
        pinned host memory. The memory is used again the next time. What is kept under this label
        stays: an update has broken off since, and the weights may be half of it.
        """
        self._arrived = hashes(self._device)
        if label == self.kept:
            return
        self.forget()
        self._places = []
        tensors = {}
        for module in self._model.modules():
            own = {name: dict(getattr(module, name)) for name in ("_parameters", "_buffers")}
            own["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
            self._places.append((module, own))
            for name in ("_parameters", "_buffers"):
                tensors.update({id(one): one for one in own[name].values() if one is not None})
        before = self._copies
        if not before:
            self._is_beside = has_room_beside(self._model)
        self._copies = {}
        for key, one in tensors.items():
            known = before.get(key)
            if known is None or known[0] is not one:
                known = (one, room_like(one.data, on_device=self._is_beside))
            known[1].copy_(one.data)
            self._copies[key] = known
        self.kept = label

    def clear(self, served):
        """Gives the memory of what is kept to the next update, which comes beside. What is kept under
        the label that is served is put back first: an update has broken off since.
        """
        if self.kept == served:
            self.take_back(served, served)
        self.forget()
        self._copies = {}

    def stage(self, other):
        """Begins an update of a model beside the served one."""
        self._arrived = hashes(self._device)
        self.beside = other

    def swap(self, label):
        """Serves the update that has come beside, and keeps what was served under this label."""
        if self.beside is None or self.kept is not None:
            raise ValueError("no weights have come beside those that are served")
        exchange(self._model, self.beside)
        self.kept = label

    def loads(self, model):
        """True if an update loads this model: it comes in place, or beside."""
        return model is self._model or model is self.beside

    def arrive(self, tensors):
        """Takes note of a bucket: (name, tensor) of each whole tensor, in the order of its bytes."""
        self._arrived.add(bytes_of([tensor for _, tensor in tensors]))

    @torch.no_grad()
    def take_back(self, label, served):
        """Puts the weights that were kept where they were, also after an update that broke off.
        `served` is the label that the server gives to its weights. If it is the same and nothing is
        kept under it, no update has begun since, and there is nothing to do.
        """
        if self.kept != label:
            if served == label:
                return
            raise ValueError(f"the weights {label!r} are not kept; kept are {self.kept!r}")
        if self.beside is not None:
            for one, other in pairs_of(self._model, self.beside):
                one.copy_(other)
            return
        for module, own in self._places:
            for name, value in own.items():
                vars(module)[name] = value.copy()
        for one, copy in self._copies.values():
            one.data.copy_(copy)

    def forget(self):
        """Says that weights come in another way: what is kept is not what they replace."""
        self.kept = None
        self.beside = None

    def state(self):
        return {
            "arrived": self._arrived.digests(),
            "keeps": self.can_keep,
            "stages": self.can_stage,
        }


def room_like(tensor, *, on_device):
    if on_device:
        return torch.empty_like(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True)


class IncomingVersion:
    """A version on its way. Only its own thread writes to it until `done`."""

    def __init__(self, order):
        self.order = order
        self.digests = []
        self.most_bytes = 0
        """The most bytes of it that were there at once, in another form than the model's."""
        self.error = ""
        self.ready = None
        self.done = False


NOTHING_ORDERED = {
    "version": None,
    "done": True,
    "digests": [],
    "error": "nothing was ordered",
    "live": None,
    "held": None,
}
"""The state of a worker that received nothing by our plugin."""


class DoubleBuffer:
    """The versions that a worker holds: the one that came last, and the one that is served. Its
    methods never wait.
    """

    def __init__(self, prepare, swap, device=CPU):
        """`prepare` turns an iterator of named tensors into the argument of `swap`. A tensor comes
        when it is asked for, and need not be kept. `swap` makes that the served weights, and returns
        what makes those before them served again, or `None` if they are gone. `device` has the
        model.
        """
        self._prepare = prepare
        self._swap = swap
        self._device = device
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
            return {**NOTHING_ORDERED, "live": self._live, "held": held}
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

    def forget_live(self):
        """Says that the model serves weights by now that came in another way."""
        self._live = None

    def forget(self):
        """Says the same, and lets go of the version that came."""
        self._coming = None
        self._live = None

    def let_go(self):
        """Gives back the memory of the version that is not served, which cannot be taken any more."""
        coming = self._coming
        if coming is None or not coming.done:
            return
        coming.ready = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

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
            with (
                quickly_served(),
                working_on(self._device),
                torch.no_grad(),
                self._seated(order, rank) as seat,
            ):
                if order["base"] or order["keeps"]:
                    tensors = self._whole(seat, coming)
                else:
                    tensors = self._arriving(seat, coming)
                if order["serves"]:
                    coming.ready = self._prepare(tensors)
                deque(tensors, maxlen=0)  # what was not asked for must come too
        except Exception as error:
            coming.error = f"{type(error).__name__}: {error}".partition("\n")[0]
        coming.done = True

    @contextmanager
    def _seated(self, order, rank):
        """The seat for one version. A round that fails leaves none for the next."""
        if order["bucket"] is not None:
            with closing(HandleSeat(order, rank, self._device)) as seat:
                yield seat
            return
        seat = self._seat
        self._seat = None
        if not order["again"]:
            seat = GroupSeat(order, rank)
        elif seat is None or seat.name != order["group"]:
            raise ValueError(f"this worker was never in group {order['group']}")
        yield seat
        self._seat = seat

    def _whole(self, seat, coming):
        """Receives all of a version in host memory, where differences are applied. Returns its
        tensors.
        """
        order = coming.order
        data = torch.empty(order["num_bytes"], dtype=torch.uint8)
        coming.most_bytes = len(data)
        for start in range(0, len(data), order["bucket_bytes"]):
            part = data[start : start + order["bucket_bytes"]]
            seat.receive(part)
            coming.digests.append(sha256(part))
        if order["base"]:
            data = self._changed(data, order)
        if order["keeps"]:
            self._keep(data, order)
        return iter([(name, _view(data, *where)) for name, *where in order["tensors"]])

    def _arriving(self, seat, coming):
        """Yields each tensor when its last bucket has come. Only a bucket, and the tensors that are
        not complete, are held here.
        """
        order = coming.order
        device = self._device if order["on_device"] else CPU
        hashed = OnDevice() if order["on_device"] else OnHost()
        size = min(order["bucket_bytes"], order["num_bytes"])
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        waiting = deque(sorted(order["tensors"], key=lambda tensor: tensor[3]))
        begun = None
        for start in range(0, order["num_bytes"], order["bucket_bytes"]):
            part = bucket[: min(size, order["num_bytes"] - start)]
            seat.receive(part)
            hashed.add(part)
            stop = start + len(part)
            while waiting and waiting[0][3] < stop:
                name, dtype, shape, offset, num_bytes = waiting[0]
                if begun is None:
                    begun = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                    coming.most_bytes = max(coming.most_bytes, size + num_bytes)
                first = max(offset, start)
                last = min(offset + num_bytes, stop)
                begun[first - offset : last - offset].copy_(part[first - start : last - start])
                if offset + num_bytes > stop:
                    break
                waiting.popleft()
                yield name, begun.view(DTYPES[dtype]).view(shape)
                begun = None
        for name, dtype, shape, *_ in waiting:  # those without a number
            yield name, torch.empty(shape, dtype=DTYPES[dtype], device=device)
        coming.digests += hashed.digests()

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
    """True if a model's weights may be made ready in other memory and exchanged. They may not if
    layers pack their weights and keep them in places of their own, nor if the device has no room for
    them twice.
    """
    return keeps_nothing_else(model) and has_room_beside(model)


def keeps_nothing_else(model):
    """True if layers keep their weights in the attributes that `exchange` exchanges."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN:
            return False
        if getattr(module, "use_intel_amx_backend", False):
            return False
    return True


def has_room_beside(model):
    device = device_of(model)
    if device.type != "cuda":
        return True
    tensors = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    # what torch has set aside and does not use is free for us too
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free > sum(tensors.values()) + SPARE_BYTES


class LoadedInPlace:
    """The tensors of a model that takes weights only in a pause, where it loads them over those that
    it has. What was loaded before is kept, so that it can be loaded again.
    """

    def __init__(self, load):
        self._load = load
        self._tensors = None

    def swap(self, tensors):
        """Loads the tensors. Returns those that were loaded before, or `None` if there are none."""
        before = self._tensors
        self._tensors = None
        self._load(tensors)
        self._tensors = tensors
        return before

    def forget(self):
        """Says that the model has other weights by now."""
        self._tensors = None


def in_host_memory(tensors):
    """The tensors in a list. It is for a model that takes them only in a pause."""
    return [(name, tensor.cpu()) for name, tensor in tensors]


SPARE_BYTES = 2**29
"""Bytes that must stay free on a device beside a second copy of the weights."""


def device_of(model):
    return next(model.parameters()).device


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


PIECE_BYTES = 2**26
"""Bytes that are exchanged at once on a device."""


def exchange(model, other):
    """Exchanges the weights of two models, and returns the other one. On a CPU no byte is copied.

    On another device the tensors stay where they are and exchange their numbers, because recorded
    graphs hold their addresses.
    """
    if device_of(model).type != "cpu":
        exchange_numbers(model, other)
        return other
    for ours, theirs in zip(model.modules(), other.modules(), strict=True):
        a = vars(ours)
        b = vars(theirs)
        for name in EXCHANGED:
            if name in a:
                a[name], b[name] = b[name], a[name]
    return other


@torch.no_grad()
def exchange_numbers(model, other):
    """Exchanges the numbers of all parameters and buffers. It takes memory for a piece."""
    for one, theirs in pairs_of(model, other):
        for a, b in pieces(one, theirs):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)


def pairs_of(model, other):
    """Yields each parameter and buffer of a model once, with that of the other model."""
    done = set()
    for ours, theirs in zip(model.modules(), other.modules(), strict=True):
        for name in ("_parameters", "_buffers"):
            for key, one in getattr(ours, name).items():
                if one is None or id(one) in done:
                    continue
                done.add(id(one))
                yield one.data, getattr(theirs, name)[key].data


def pieces(one, other):
    """Yields views of two tensors of one shape, piece by piece. What does not lie in one row is one
    piece.
    """
    if not one.is_contiguous() or not other.is_contiguous():
        yield one, other
        return
    a = one.view(-1)
    b = other.view(-1)
    each = max(1, PIECE_BYTES // one.element_size())
    for start in range(0, len(a), each):
        yield a[start : start + each], b[start : start + each]
