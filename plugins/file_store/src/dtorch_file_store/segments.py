"""Shared memory in large pieces: made here, and mapped by the other processes of a session.

Each is a file without a name (memfd), so that nothing is left behind whoever is killed, and sealed, so that no process
can shorten it under another one's reads. Its pages are reserved before it is used: a write never ends in a signal.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

import torch
from torch import Tensor

from dtorch_core._text import size_text
from dtorch_core.errors import DtorchError, NoRoomError
from dtorch_file_store.headroom import BUDGET, why_not

PAGE = mmap.PAGESIZE
_STEP = 64 << 20
"""Bytes reserved at a time: between steps we look whether others have taken the memory, and signals are handled."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

# Not the module mmap: its objects keep a file descriptor open, and hold the interpreter's lock while in the kernel.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """One piece of this process's shared memory.

    It stays mapped as long as a tensor over a part of it lives, closed or not.
    """

    def __init__(self, number: int, size: int) -> None:
        """
        :param size: a multiple of the page size.
        :raises NoRoomError: if memory is short, or no file can be made; the message is the reason alone.
        """
        self.number = number
        self.size = size
        self._held = [0]
        """Bytes that count as held; a list, since it outlives this object."""
        try:
            self.fd = os.memfd_create("dtorch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NoRoomError(f"no file can be made for it: {error.strerror}") from error

        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.refill()
            buffer, self.address = _map(self.fd, size)
        except BaseException as error:
            os.close(self.fd)
            _give(self._held)
            if isinstance(error, OSError):
                raise NoRoomError(f"the kernel refused it: {error.strerror}") from error

            raise

        weakref.finalize(buffer, _give, self._held).atexit = False
        self.memory = memoryview(buffer).cast("B")
        self._populate()

    @property
    def dry(self) -> bool:
        """Its pages were given back: nobody may use it before :meth:`refill`."""
        return not self._held[0]

    def refill(self) -> None:
        """Reserve its pages.

        :raises NoRoomError: if memory is short; the message is the reason alone.
        """
        refusal = BUDGET.take(self.size)
        if refusal is not None:
            raise NoRoomError(refusal)

        self._held[0] = self.size
        try:
            for start in range(0, self.size, _STEP):
                step = min(_STEP, self.size - start)
                refusal = why_not(self.size - start)
                if refusal is not None:
                    raise NoRoomError(refusal)

                os.posix_fallocate(self.fd, start, step)
        except BaseException as error:
            self.drain()
            if isinstance(error, OSError):
                raise NoRoomError(f"the kernel refused it: {error.strerror}") from error

            raise

    def drain(self) -> None:
        """Give its pages back, in every process at once; only where nobody uses a byte of it."""
        _libc.fallocate(self.fd, _PUNCH_HOLE, 0, self.size)
        _give(self._held)

    def close(self) -> None:
        """Let go of the file; the memory goes with the last tensor over it, here and in the other processes."""
        os.close(self.fd)
        del self.memory

    def _populate(self) -> None:
        # Refused by kernels before 5.14. The pages are reserved all the same, and are mapped at the first touch.
        _libc.madvise(self.address, self.size, _POPULATE_WRITE)


class Mapping:
    """A peer's segment, mapped whole."""

    def __init__(self, fd: int, size: int) -> None:
        """
        :param fd: of the segment; closed here, whatever happens.
        :param size: of the segment, as the peer says.
        :raises DtorchError: if it is no sealed segment of this size, or can't be mapped.
        """
        what = f"a peer's shared memory of {size_text(size)}"
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS or os.fstat(fd).st_size != size:
                raise DtorchError(f"{what} is not as it was said to be")

            buffer, _ = _map(fd, size)
        except OSError as error:
            raise DtorchError(
                f"{what} can't be mapped: {error.strerror}; raise the limit of this process's memory (ulimit -v), or "
                f"publish less at a time"
            ) from error
        finally:
            os.close(fd)

        self._memory = memoryview(buffer).cast("B")

    @property
    def size(self) -> int:
        """In bytes; 0 once it is closed."""
        return len(self._memory)

    def bytes(self, offset: int, nbytes: int) -> Tensor:
        """A part of it as ``uint8``, whose storage spans just these bytes.

        It may be used as long as its owner does not give these bytes to another block; it may be kept after ``close``.

        :raises DtorchError: if it does not lie inside the segment.
        """
        memory = self._memory
        if not 0 <= offset <= offset + nbytes <= len(memory):
            raise DtorchError(
                f"bytes {offset} to {offset + nbytes} are outside of a peer's {size_text(len(memory))} of shared memory"
            )

        return bytes_of(memory, offset, nbytes)

    def close(self) -> None:
        """Unmap it when the last tensor over it goes."""
        self._memory = memoryview(b"")


def bytes_of(memory: memoryview, offset: int, nbytes: int) -> Tensor:
    """A part of mapped memory as ``uint8``; the memory stays mapped as long as the tensor's storage lives."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)

    return torch.frombuffer(memory[offset : offset + nbytes], dtype=torch.uint8)


def _map(fd: int, size: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """The file's memory, and its address; unmapped when nothing refers to the former any more.

    :raises OSError: if the kernel refuses.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, _libc.munmap, address, size).atexit = False
    return buffer, address


def _give(held: list[int]) -> None:
    BUDGET.give(held[0])
    held[0] = 0
