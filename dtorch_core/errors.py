"""Every error of the project.

Each one also inherits the builtin that fits, so ``except TimeoutError`` works for callers who never heard of us.
A message says what failed, for whom (name, key, rank, pid), why, and the way out.
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "BackendConflictError",
    "BrokenPromiseError",
    "CollectiveMismatchError",
    "DtorchError",
    "KeyInUseError",
    "NoBackendError",
    "NoRoomError",
    "PeerLostError",
    "PluginError",
    "PluginVersionError",
    "ProtocolError",
    "RankFailedError",
    "StoreTimeoutError",
    "UnsupportedOperationError",
    "UnsupportedTensorError",
]


class DtorchError(Exception):
    """Base of all errors of this project."""


class NoBackendError(DtorchError, LookupError):
    """No backend fits the topology, or the one asked for does not. The message carries every refusal."""


class BackendConflictError(DtorchError):
    """Two distributions offer one backend name, so neither is used."""


class PluginError(DtorchError, ImportError):
    """A plugin can't be used. Raised when it is asked for by name, or in strict mode."""


class PluginVersionError(PluginError):
    """A plugin was written for another version of the hook contract."""


class StoreTimeoutError(DtorchError, TimeoutError, RuntimeError):
    """A wait ended at its deadline. The message says who has not come; the wait can be repeated.

    A RuntimeError as well: that is what programs of ``torch.distributed`` catch.
    """


class PeerLostError(DtorchError, ConnectionError, RuntimeError):
    """Another rank died, or left, and what this rank waits for can't come any more. A RuntimeError as well."""


class ProtocolError(DtorchError, RuntimeError):
    """A call came out of order: a finish without a get, a wait for a key never set, a second result."""


class KeyInUseError(ProtocolError):
    """The key is still live: its producer has not waited for its consumers yet."""


class CollectiveMismatchError(DtorchError, RuntimeError):
    """The ranks of a group called different operations. The message shows who called what."""


class BrokenPromiseError(DtorchError, RuntimeError):
    """The holder of a promise dropped it, or died, before it set a result."""


class UnsupportedTensorError(DtorchError, TypeError):
    """This kind of tensor can't be carried, or not by this operation."""


class UnsupportedOperationError(DtorchError, NotImplementedError):
    """The backend does not declare the capability that this call needs."""


class NoRoomError(DtorchError, MemoryError):
    """Memory for a tensor can't be had. The message says how much was asked for, and why not."""


class AbortedError(DtorchError, RuntimeError):
    """The store or group was reset, closed or aborted while this call waited, or before it."""


class RankFailedError(DtorchError, RuntimeError):
    """A rank that :func:`dtorch_core.spawn` started raised. Carries its traceback."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first."""
