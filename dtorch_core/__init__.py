"""PyTorch ranks that exchange tensors: contracts, hook specs, selection and a conformance kit.

Importing this imports neither torch nor a plugin: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtorch_core._context import BackendContext
    from dtorch_core._selection.authority import use_backend
    from dtorch_core._selection.reasons import BackendSpec, Selection, Support, Verdict
    from dtorch_core._selection.registry import refresh, register, unregister
    from dtorch_core._selection.selector import explain, select
    from dtorch_core._selection.topology import Member, Topology
    from dtorch_core.errors import (
        AbortedError,
        BackendConflictError,
        BrokenPromiseError,
        CollectiveMismatchError,
        DtorchError,
        KeyInUseError,
        NoBackendError,
        NoRoomError,
        PeerLostError,
        PluginError,
        PluginVersionError,
        ProtocolError,
        RankFailedError,
        StoreTimeoutError,
        UnsupportedOperationError,
        UnsupportedTensorError,
    )
    from dtorch_core.group import ThreadGroup, open_group
    from dtorch_core.hookspecs import hookimpl
    from dtorch_core.launcher import RankContext, spawn
    from dtorch_core.manager import ThreadGroupManager
    from dtorch_core.placement import (
        Layout,
        copy_tensor,
        gather_tensor,
        plan_redistribution,
        redistribute,
        redistribute_mesh,
        scatter_tensor,
    )
    from dtorch_core.promise import GetTensorOp, TensorFuture, TensorPromise, attach_promise, make_promise
    from dtorch_core.store import TensorStore, open_store

__version__ = "0.1.0"

_HOMES = {
    "_selection.authority": "use_backend",
    "_context": "BackendContext",
    "_selection.reasons": "BackendSpec Selection Support Verdict",
    "_selection.registry": "refresh register unregister",
    "_selection.selector": "explain select",
    "_selection.topology": "Member Topology",
    "errors": "AbortedError BackendConflictError BrokenPromiseError CollectiveMismatchError DtorchError KeyInUseError "
    "NoBackendError NoRoomError PeerLostError PluginError PluginVersionError ProtocolError RankFailedError "
    "StoreTimeoutError UnsupportedOperationError UnsupportedTensorError",
    "group": "ThreadGroup open_group",
    "hookspecs": "hookimpl",
    "launcher": "RankContext spawn",
    "manager": "ThreadGroupManager",
    "placement": "Layout copy_tensor gather_tensor plan_redistribution redistribute redistribute_mesh scatter_tensor",
    "promise": "GetTensorOp TensorFuture TensorPromise attach_promise make_promise",
    "store": "TensorStore open_store",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "AbortedError",
    "BackendConflictError",
    "BackendContext",
    "BackendSpec",
    "BrokenPromiseError",
    "CollectiveMismatchError",
    "DtorchError",
    "GetTensorOp",
    "KeyInUseError",
    "Layout",
    "Member",
    "NoBackendError",
    "NoRoomError",
    "PeerLostError",
    "PluginError",
    "PluginVersionError",
    "ProtocolError",
    "RankContext",
    "RankFailedError",
    "Selection",
    "StoreTimeoutError",
    "Support",
    "TensorFuture",
    "TensorPromise",
    "TensorStore",
    "ThreadGroup",
    "ThreadGroupManager",
    "Topology",
    "UnsupportedOperationError",
    "UnsupportedTensorError",
    "Verdict",
    "attach_promise",
    "copy_tensor",
    "explain",
    "gather_tensor",
    "hookimpl",
    "make_promise",
    "open_group",
    "open_store",
    "plan_redistribution",
    "redistribute",
    "redistribute_mesh",
    "refresh",
    "register",
    "scatter_tensor",
    "select",
    "spawn",
    "unregister",
    "use_backend",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise

        raise ModuleNotFoundError(f"{__name__}.{name} needs torch: pip install torch", name="torch") from error

    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
