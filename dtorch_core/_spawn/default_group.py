"""The default process group of ``torch.distributed`` for a rank of :func:`spawn`."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch.distributed as dist

from dtorch_core._scope import Scope
from dtorch_core._spawn.ranks import is_told, said

TIMEOUT = 300.0
"""Seconds that opening, and each collective, may take."""


@contextmanager
def default_group(scope: Scope, world_size: int, *, alone: bool, opens: bool = True) -> Iterator[None]:
    """``dist.*`` works in here, in this thread and in those that it starts. Collective.

    What the function in here leaves open is destroyed; not where it raises, since its peers are ended then. A process
    of one rank that has opened the group itself has it until its exit handlers have run.

    :param alone: this rank is the only one in its process, whose own default group it becomes.
    :param opens: False: what is in here opens the group itself.
    :raises UnsupportedOperationError: if this torch can't be divided among ranks that are threads.
    """
    from dtorch_core import torch_backends
    from dtorch_core._thread_ranks import refused as _refused
    from dtorch_core._thread_ranks import worlds

    torch_backends.register_any()
    with ExitStack() as stack:
        if not alone:
            stack.enter_context(worlds.entered(scope))
            if world_size > 1:
                stack.enter_context(_refused.refused.held())

        if opens:
            hook = sys.excepthook
            dist.init_process_group(
                torch_backends.ANY,
                store=dist.PrefixStore("torch.distributed", scope.rendezvous),
                rank=scope.rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT),
            )
            if not alone:
                sys.excepthook = hook  # c10d's would add this rank's name to what any thread raises

        end = _AtExit() if alone and not opens else None
        try:
            yield
        except BaseException as error:
            # Before the groups go: a peer that waits in one of them is to hear of the failure, not of a departure.
            scope.abort(f"rank {scope.rank} failed: {said(error)}", died=not is_told(error))
            raise

        if end is not None:
            end.closing = scope.left_open()
        elif dist.is_initialized():
            dist.destroy_process_group()


class _AtExit:
    """Ends what a script has left open, after all exit handlers that the script has registered: this one was first."""

    closing: ExitStack | None = None
    """None: the script has not returned."""

    def __init__(self) -> None:
        atexit.register(self._end)

    def _end(self) -> None:
        if self.closing is None:
            return

        with self.closing:
            if dist.is_initialized():
                dist.destroy_process_group()
