"""Memory of a GPU that other processes of its machine read: CUDA IPC. One process gives a bucket, whose
handle is 64 bytes that may travel as text, and others open it.

The functions are those of NVIDIA's driver. torch's own handles carry a counter in /dev/shm, have a
form of its version, which trainer and server need not share, and are not for memory of expandable
segments. Memory that the driver gives lies outside torch's allocator, whatever its settings are.

It imports torch and the standard library only, because servers' workers load this file by its path.
Between two GPUs it is untested.
"""

import ctypes
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

HANDLE_BYTES = 64
"""The size of a handle, which the driver fixes."""
_ENABLE_PEERS = 1
"""Lets the driver map memory of another GPU, if the two can read each other's."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class HandleRefused(Exception):
    """A bucket cannot be given or opened here. The text says why, as a part of a sentence."""


def machine() -> str:
    """The name of this machine, which its containers share and no other machine has."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def device_name(device: torch.device) -> str:
    """The name of a device that is the same in all processes, which may number devices anew."""
    if device.type != "cuda":
        return str(device)
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"


def given_bucket(device: torch.device, num_bytes: int) -> "GivenBucket":
    """Memory of this process that others may open. Raises `HandleRefused` if the device gives none."""
    return GivenBucket(device, num_bytes)


def opened_bucket(handle: str, device: torch.device) -> "OpenedBucket":
    """The bucket that another process gave, read from `device`, which may be another GPU. Raises
    `HandleRefused` if it cannot be opened.
    """
    return OpenedBucket(handle, device)


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class _Driver:
    """The functions of the driver that are needed, for the context that torch has on a device."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise HandleRefused(f"memory of {device.type} has no handles")
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise HandleRefused(f"there is no driver of CUDA ({error})") from error
        self._device = device
        self.enter()
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise HandleRefused(f"this thread has no context of CUDA on {device}")

    def enter(self) -> None:
        """Gives this thread torch's context on the device, which it has from such a call on."""
        torch.cuda.set_device(self._device)
        torch.cuda.current_stream(self._device).synchronize()

    def call(self, name: str, *given: object) -> None:
        """Calls a function. Raises `HandleRefused` with the driver's words if it fails."""
        status = getattr(self._library, name)(*given)
        if status == 0:
            return
        said = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(said))
        words = said.value.decode() if said.value else f"error {status}"
        raise HandleRefused(f"{name} says: {words}")

    def copy(self, into: int, source: int, num_bytes: int) -> None:
        """Copies within devices, and waits until it is done. Nothing goes through host memory."""
        self.enter()
        stream = torch.cuda.current_stream(self._device)
        self.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(into),
            ctypes.c_uint64(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(stream.cuda_stream),
        )
        stream.synchronize()


class GivenBucket:
    """Memory on a device that this process writes, and others read."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._driver = _Driver(device)
        place = ctypes.c_uint64()
        size = ctypes.c_size_t(max(1, num_bytes))
        try:
            self._driver.call("cuMemAlloc_v2", ctypes.byref(place), size)
        except HandleRefused:
            torch.cuda.empty_cache()  # torch may hold what is missing
            self._driver.call("cuMemAlloc_v2", ctypes.byref(place), size)
        self._place = place.value
        handle = _Handle()
        try:
            self._driver.call(
                "cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._place)
            )
        except HandleRefused:
            self.free()
            raise
        self.handle = bytes(handle.bytes).hex()

    def write(self, part: Tensor) -> None:
        """Copies a part of the same device to the beginning. Returns when others may read it."""
        self._driver.copy(self._place, part.data_ptr(), part.nbytes)

    def free(self) -> None:
        """Gives the memory back. Nobody may have it open: what they would read is not defined."""
        with suppress(HandleRefused):
            self._driver.enter()
            self._driver.call("cuMemFree_v2", ctypes.c_uint64(self._place))


class OpenedBucket:
    """Memory of another process, which this one reads."""

    def __init__(self, handle: str, device: torch.device) -> None:
        self._driver = _Driver(device)
        told = _Handle.from_buffer_copy(bytes.fromhex(handle))
        place = ctypes.c_uint64()
        self._driver.call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(place), told, ctypes.c_uint(_ENABLE_PEERS)
        )
        self._place = place.value

    def read(self, part: Tensor) -> None:
        """Fills a part, on the device that it was opened from. Returns when the bytes are there."""
        self._driver.copy(part.data_ptr(), self._place, part.nbytes)

    def close(self) -> None:
        with suppress(HandleRefused):
            self._driver.enter()
            self._driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(self._place))
