"""What torch has once in a process and ranks that are threads can't share: they are told so, and of the way out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

from dtorch_core import _scope
from dtorch_core._thread_ranks.module_patch import ModulePatch
from dtorch_core._thread_ranks.shared_patch import replace
from dtorch_core.errors import UnsupportedOperationError

_RPC = "torch.distributed.rpc.init_rpc: RPC has one agent in a process"
_SAVER = (
    "torch.distributed.checkpoint.async_save: AsyncCheckpointerType.PROCESS has one process that saves for each that "
    "trains"
)
_THREAD = "AsyncCheckpointerType.THREAD, or "


def _refuse(path: str, what: str, other: str, module: ModuleType, stack: ExitStack) -> None:
    """
    :param path: of the function, in the module.
    :param other: a way out beside the common one.
    """
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)

    if not hasattr(owner, name):
        return

    def call(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        scope = _scope.current()
        if scope is not None:
            raise UnsupportedOperationError(
                f"{what}, and rank {scope.rank} is one of several threads of this process. "
                f"Use {other}ranks that are processes: spawn(ranks_as='processes'), dtorch run --ranks-as processes"
            )

        return original(*args, **named)

    original: Callable[..., Any] = replace(stack, owner, name, call)
    functools.update_wrapper(call, original)


_CHANGES: dict[str, Callable[[ModuleType, ExitStack], None]] = {
    "torch.distributed.rpc": partial(_refuse, "init_rpc", _RPC, ""),
    # By who imported init_rpc before there were ranks.
    "torch.distributed.autograd": partial(_refuse, "_init", _RPC, ""),
    "torch.distributed.checkpoint._async_process_executor": partial(
        _refuse, "_ProcessBasedAsyncCheckpointExecutor.__init__", _SAVER, _THREAD
    ),
}

refused = ModulePatch(_CHANGES)
"""While it is held, ranks can't have these."""
