"""What torch traces, one rank after the other: its tracers keep their modes and patches in variables of the process.

``torch.export``, which ``pipeline()`` of ``torch.distributed.pipelining`` calls, and ``torch.fx``. Meanwhile the other
ranks' modules run as they do: a tracer's patches of ``Module`` count in the threads of the rank that traces.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

from dtorch_core import _scope
from dtorch_core._thread_ranks.module_patch import ModulePatch
from dtorch_core._thread_ranks.shared_patch import replace

_lock = threading.RLock()


def _enter(stack: ExitStack) -> None:
    """torch.compile's own lock comes first, where it may be held: what it compiles is traced, and export compiles."""
    compiling = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if compiling is not None:
        stack.enter_context(compiling)

    stack.enter_context(_lock)


def _one_at_a_time(path: str, module: ModuleType, stack: ExitStack) -> None:
    """
    :param path: of the function, in the module.
    """
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)

    if not hasattr(owner, name):
        return

    def call(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        with ExitStack() as locks:
            _enter(locks)
            return original(*args, **named)

    original: Callable[..., Any] = replace(stack, owner, name, call)
    functools.update_wrapper(call, original)


def _for_the_tracer(module: ModuleType, stack: ExitStack) -> None:
    _one_at_a_time("Tracer.trace", module, stack)
    patcher = getattr(module, "_Patcher", None)
    if not hasattr(patcher, "patch_method"):
        return

    def patch(self: Any, owner: type, name: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401
        scope, others = _scope.current(), getattr(owner, name)

        @functools.wraps(method)
        def call(*given: Any, **by_name: Any) -> Any:  # noqa: ANN401
            return (method if _scope.current() is scope else others)(*given, **by_name)

        return original(self, owner, name, call, *args, **named)

    original = replace(stack, patcher, "patch_method", patch)


_CHANGES: dict[str, Callable[[ModuleType, ExitStack], None]] = {
    "torch.export._trace": partial(_one_at_a_time, "_export"),
    # By its name, which it has imported.
    "torch.export._draft_export": partial(_one_at_a_time, "_export"),
    "torch.export.exported_program": partial(_one_at_a_time, "ExportedProgram.run_decompositions"),
    "torch.fx._symbolic_trace": _for_the_tracer,
}

divided = ModulePatch(_CHANGES)
"""While it is held, threads take turns."""
