"""CUDA's driver, as far as processes need it to share memory and to order their streams; by ctypes, nothing compiled.

torch has no call for any of this. Every call that needs a context runs in the primary one of its device, which is the
one that torch uses; a thread that never used CUDA has none, so it is made current for the call (:meth:`Driver.on`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from types import TracebackType
from typing import NamedTuple

import torch

from dtorch_core.errors import DtorchError

LIBRARY = "libcuda.so.1"

HANDLE_BYTES = 64
"""Of an interprocess handle."""

_LAZY_ENABLE_PEER_ACCESS = 1
_PORTABLE, _DEVICEMAP = 1, 2
_WAIT_GEQ = 0
_INVALID_VALUE = 1
_INVALID_CONTEXT = 201
_WRITE_DEFAULT = 0  # with a barrier: what the stream did before is seen by whoever sees the value

COMPUTE_MODE, INTEGRATED, HOST_REGISTER_SUPPORTED, IPC_EVENT_SUPPORTED = 20, 18, 99, 125
"""Numbers of device attributes."""

EXCLUSIVE_MODES = {2: "prohibited", 3: "exclusive to one process"}
"""Values of COMPUTE_MODE in which two processes can't use a device."""

_BUFFER_ID, _DEVICE_ORDINAL, _LEGACY_IPC, _RANGE_START, _RANGE_SIZE = 7, 9, 10, 11, 12
_ATTRIBUTES = (c_int * 5)(_BUFFER_ID, _DEVICE_ORDINAL, _LEGACY_IPC, _RANGE_START, _RANGE_SIZE)

_WAYS_OUT = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: look at CUDA_VISIBLE_DEVICES and nvidia-smi",
    "CUDA_ERROR_OUT_OF_MEMORY": "free GPU memory, or torch.cuda.empty_cache()",
    "CUDA_ERROR_INVALID_CONTEXT": "the memory belongs to this process itself, or CUDA is shut down here",
    "CUDA_ERROR_INVALID_VALUE": "the memory was freed, was not made by cudaMalloc, or its owner is gone",
    "CUDA_ERROR_INVALID_HANDLE": "the memory was freed, or its owner is gone",
    "CUDA_ERROR_MAP_FAILED": "the two processes may not share this device (containers, or no peer access)",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "these two devices can't reach each other's memory",
    "CUDA_ERROR_TOO_MANY_PEERS": "a device has too many peers; use fewer devices in one process",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "the page is registered already: register each page once",
    "CUDA_ERROR_NOT_SUPPORTED": "this device or system lacks the call; tensors then go through host memory",
    "CUDA_ERROR_NOT_PERMITTED": "this system forbids the call; tensors then go through host memory",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel read or wrote memory that is not there; CUDA is lost here",
    "CUDA_ERROR_LAUNCH_FAILED": "an earlier kernel failed; CUDA is lost in this process",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "the stream is captured into a graph; exchange tensors outside of it",
}


class DriverError(DtorchError):
    """A call of CUDA's driver failed. The message has the driver's name of the error and the way out."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name
        """The driver's name, as ``"CUDA_ERROR_INVALID_VALUE"``."""


class Allocation(NamedTuple):
    """The memory that an address lies in, as the driver knows it."""

    base: int
    size: int
    buffer: int
    """Never given twice in a process, also where a base is; 0 if there is no such memory."""
    ordinal: int
    exportable: bool
    """An interprocess handle can be had."""


NO_ALLOCATION = Allocation(0, 0, 0, 0, False)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


class _Scratch(threading.local):
    """Where the driver answers; one for each thread, since making it costs more than the call."""

    def __init__(self) -> None:
        self.values = (c_uint64 * len(_ATTRIBUTES))()
        start = ctypes.addressof(self.values)
        self.places = (c_uint64 * len(_ATTRIBUTES))(*range(start, start + 8 * len(_ATTRIBUTES), 8))
        self.context = c_uint64()
        self.context_place = byref(self.context)
        self.status = c_int()


class Driver:
    """The calls. Thread-safe, as the driver is; the interpreter's lock is free during each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """
        :raises DriverError: if the library lacks a call, or CUDA can't be used here.
        """
        self._primaries: dict[int, int] = {}
        self._mutex = threading.Lock()
        self._scratch = _Scratch()

        def bind(symbol: str, *arguments: object) -> Callable[..., int]:
            try:
                function = getattr(library, symbol)
            except AttributeError:
                raise DriverError(f"{LIBRARY} has no {symbol}: install a driver for CUDA 12 or newer") from None

            function.argtypes, function.restype = arguments, c_int
            return function  # type: ignore[no-any-return]

        pointer = c_uint64
        self._error_name = bind("cuGetErrorName", c_int, POINTER(c_char_p))
        self._device_count = bind("cuDeviceGetCount", POINTER(c_int))
        self._device_attribute = bind("cuDeviceGetAttribute", POINTER(c_int), c_int, c_int)
        self._device_uuid = bind("cuDeviceGetUuid_v2", c_void_p, c_int)
        self._primary_retain = bind("cuDevicePrimaryCtxRetain", POINTER(pointer), c_int)
        self._context_get = bind("cuCtxGetCurrent", POINTER(pointer))
        self._context_push = bind("cuCtxPushCurrent_v2", pointer)
        self._context_pop = bind("cuCtxPopCurrent_v2", POINTER(pointer))
        self._synchronize = bind("cuCtxSynchronize")
        self._pointer_attributes = bind("cuPointerGetAttributes", c_uint, c_void_p, c_void_p, pointer)
        self._pointer_attribute = bind("cuPointerGetAttribute", c_void_p, c_int, pointer)
        self._allocate = bind("cuMemAlloc_v2", POINTER(pointer), c_size_t)
        self._free = bind("cuMemFree_v2", pointer)
        self._ipc_get = bind("cuIpcGetMemHandle", POINTER(_Handle), pointer)
        self._ipc_open = bind("cuIpcOpenMemHandle_v2", POINTER(pointer), _Handle, c_uint)
        self._ipc_close = bind("cuIpcCloseMemHandle", pointer)
        self._host_register = bind("cuMemHostRegister_v2", pointer, c_size_t, c_uint)
        self._host_unregister = bind("cuMemHostUnregister", pointer)
        self._host_device_pointer = bind("cuMemHostGetDevicePointer_v2", POINTER(pointer), pointer, c_uint)
        # The second versions work on every device; the first only where a parameter of the kernel module allows it.
        self._stream_write = bind("cuStreamWriteValue32_v2", pointer, pointer, c_uint32, c_uint)
        self._stream_wait = bind("cuStreamWaitValue32_v2", pointer, pointer, c_uint32, c_uint)
        self._is_capturing = bind("cuStreamIsCapturing", pointer, POINTER(c_int))
        self._check("cuInit", bind("cuInit", c_uint)(0))

    # Devices

    def device_count(self) -> int:
        """How many devices this process sees."""
        number = c_int()
        self._check("cuDeviceGetCount", self._device_count(byref(number)))
        return number.value

    def uuid(self, ordinal: int) -> str:
        """What a device is called in every process: 32 hexadecimal digits. A MIG slice has its own."""
        memory = (c_char * 16)()
        self._check("cuDeviceGetUuid", self._device_uuid(memory, ordinal))
        return memory.raw.hex()

    def attribute(self, ordinal: int, number: int) -> int:
        """A property of a device."""
        value = c_int()
        self._check("cuDeviceGetAttribute", self._device_attribute(byref(value), number, ordinal))
        return value.value

    def on(self, ordinal: int) -> _Current:
        """``with`` it, calls are made in the context of this device, which comes to be where it does not exist yet."""
        primary = self._primaries.get(ordinal)
        return _Current(self, primary if primary is not None else self._primary(ordinal))

    def _primary(self, ordinal: int) -> int:
        # Kept for as long as the process lives, as torch does: pages and mappings belong to it.
        with self._mutex:
            if ordinal not in self._primaries:
                context = c_uint64()
                self._check("cuDevicePrimaryCtxRetain", self._primary_retain(byref(context), ordinal))
                self._primaries[ordinal] = context.value

            return self._primaries[ordinal]

    # Memory

    def allocation(self, address: int) -> Allocation:
        """What the driver knows about ``address``. NO_ALLOCATION if it is not CUDA's, or was freed."""
        scratch = self._scratch
        ctypes.memset(scratch.values, 0, ctypes.sizeof(scratch.values))  # some answers have fewer bytes than a place
        found = self._pointer_attributes(len(_ATTRIBUTES), _ATTRIBUTES, scratch.places, address)
        self._check("cuPointerGetAttributes", found)
        buffer, ordinal, legacy, base, size = scratch.values
        return (
            Allocation(base, size, buffer, ordinal & 0xFFFFFFFF, bool(legacy & 0xFF))
            if buffer
            else Allocation(0, 0, 0, 0, False)
        )

    def buffer(self, address: int) -> int:
        """The :attr:`Allocation.buffer` of ``address`` alone; 0 if it is not CUDA's, or was freed."""
        values = self._scratch.values
        code = self._pointer_attribute(values, _BUFFER_ID, address)
        if code == _INVALID_VALUE:
            return 0

        self._check("cuPointerGetAttribute", code)
        return values[0]

    def allocate(self, nbytes: int) -> int:
        """Memory of the current device that has an interprocess handle: its address.

        :raises DriverError: if there is not enough.
        """
        address = c_uint64()
        self._check("cuMemAlloc", self._allocate(byref(address), nbytes))
        return address.value

    def free(self, address: int) -> None:
        """The end of :meth:`allocate`. May block until the device is idle."""
        self._check("cuMemFree", self._free(address))

    def ipc_handle(self, base: int) -> bytes:
        """The handle by which other processes of this machine open the allocation that begins at ``base``.

        :raises DriverError: if the memory can't be shared so: it is part of an expandable segment, of a memory pool of
            the driver, or another process's.
        """
        handle = _Handle()
        self._check("cuIpcGetMemHandle", self._ipc_get(byref(handle), base))
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation: the address of its begin. Once more if it is open: each is closed once.

        :raises DriverError: if it is this process's own, was freed, or can't be reached from the current device.
        """
        address = c_uint64()
        opened = self._ipc_open(byref(address), _Handle.from_buffer_copy(handle), _LAZY_ENABLE_PEER_ACCESS)
        self._check("cuIpcOpenMemHandle", opened)
        return address.value

    def ipc_close(self, address: int) -> None:
        """The end of :meth:`ipc_open`. Blocks until the device is idle, and other threads' launches meanwhile."""
        self._check("cuIpcCloseMemHandle", self._ipc_close(address))

    # Memory of the host

    def host_register(self, address: int, nbytes: int) -> int:
        """Let every device of this process read and write whole pages of the host: their address for devices."""
        registered = self._host_register(address, nbytes, _PORTABLE | _DEVICEMAP)
        self._check("cuMemHostRegister", registered)
        pointer = c_uint64()
        self._check("cuMemHostGetDevicePointer", self._host_device_pointer(byref(pointer), address, 0))
        return pointer.value

    def host_unregister(self, address: int) -> None:
        """The end of :meth:`host_register`. Blocks until the device is idle, and other threads' launches meanwhile."""
        self._check("cuMemHostUnregister", self._host_unregister(address))

    # Streams

    def stream_write(self, ordinal: int, stream: int, address: int, value: int) -> None:
        """Queue a store of 32 bits, behind all that a stream of the device does until then; the host goes on."""
        self._queue("cuStreamWriteValue32", self._stream_write, ordinal, (stream, address, value, _WRITE_DEFAULT))

    def stream_wait(self, ordinal: int, stream: int, address: int, value: int) -> None:
        """Queue a wait until the 32 bits at ``address`` are at or past ``value`` on their circle; the host goes on."""
        self._queue("cuStreamWaitValue32", self._stream_wait, ordinal, (stream, address, value, _WAIT_GEQ))

    def capturing(self, stream: torch.cuda.Stream) -> bool:
        """What the stream is given goes into a graph, and is not done now."""
        current = torch._C._cuda_getCurrentStream(-1)  # of the current device
        if current[0] == stream.stream_id and current[1] == stream.device_index:
            return torch.cuda.is_current_stream_capturing()  # as a rule, and torch says it in a tenth of the time

        status = self._scratch.status
        asked = stream.cuda_stream, byref(status)
        self._queue("cuStreamIsCapturing", self._is_capturing, stream.device_index, asked)
        return status.value != 0

    def _queue(self, name: str, call: Callable[..., int], ordinal: int, arguments: tuple[object, ...]) -> None:
        # A stream knows its context, but for the default one, which is the current context's.
        code = call(*arguments) if arguments[0] else _INVALID_CONTEXT
        if code == _INVALID_CONTEXT:
            with self.on(ordinal):
                code = call(*arguments)

        if code:
            self._check(name, code)

    # Contexts

    def context(self) -> int:
        """The context that is current in this thread; 0 where none is."""
        scratch = self._scratch
        self._check("cuCtxGetCurrent", self._context_get(scratch.context_place))
        return scratch.context.value

    def synchronize(self) -> None:
        """Block until all that this process has queued on the current device is done. Other threads are not held up."""
        self._check("cuCtxSynchronize", self._synchronize())

    def push(self, context: int) -> None:
        """Make a context current."""
        self._check("cuCtxPushCurrent", self._context_push(context))

    def pop(self) -> None:
        """The one before it is current again."""
        self._check("cuCtxPopCurrent", self._context_pop(byref(c_uint64())))

    def _check(self, call: str, code: int) -> None:
        if code == 0:
            return

        text = c_char_p()
        self._error_name(code, byref(text))
        name = text.value.decode() if text.value else f"error {code}"
        way_out = _WAYS_OUT.get(name)
        raise DriverError(f"CUDA's {call} failed with {name}" + (f": {way_out}" if way_out else ""), name)


class _Current:
    """A context made current, if it is not."""

    __slots__ = ("_context", "_driver", "_pushed")

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        if self._driver.context() != self._context:
            self._driver.push(self._context)
            self._pushed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pushed:
            self._driver.pop()


@functools.cache
def driver() -> Driver:
    """The one of this process.

    :raises DriverError: if CUDA can't be used here.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"{LIBRARY} can't be loaded, so CUDA can't be used here: {error}") from error

    return Driver(library)
