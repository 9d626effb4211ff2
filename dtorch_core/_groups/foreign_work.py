"""Works of c10d groups that are not ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtorch_core import streams
from dtorch_core._futures import future_of
from dtorch_core._text import seconds
from dtorch_core.errors import DtorchError, StoreTimeoutError


class ForeignWork:
    """A Work of a group that is not ours: late is StoreTimeoutError, and results go to where they belong."""

    def __init__(
        self,
        work: dist.Work,
        timeout: float,
        cuda: bool,
        steps: Sequence[Callable[[], object]] = (),
        written: Sequence[Tensor] = (),
        *,
        lazy: bool = False,
        one_sided: Sequence[Tensor] | None = None,
    ) -> None:
        """
        :param lazy: the work ends while somebody waits for it, and not otherwise.
        :param one_sided: given for a call in which this rank has tensors on one side only, a scatter or a gather of
            another rank's: its outputs. NCCL's future of such a work holds an undefined tensor, and nobody can wait for
            it: what stands for it is ordered on the stream of who asks.
        """
        self._work, self._timeout, self._cuda, self._steps, self._written = work, timeout, cuda, steps, written
        self._inference = torch.is_inference_mode_enabled() if steps else False
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._stored: list[torch.cuda.Event | None] | None = None
        self._waited, self._lazy = False, lazy
        self._one_sided = one_sided

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As c10d's; may be called again, from any stream."""
        began = self._began if timeout is None else time.monotonic()
        try:
            if timeout is None or self._cuda:
                self._work.wait()  # with a time, NCCL's would block the host until the GPU is done
            else:
                self._work.wait(timeout)
        except DtorchError:
            raise
        except RuntimeError as error:
            # c10d has no error of its own for this, and its texts differ from group to group. Its clocks start earlier.
            limit = self._timeout if timeout is None else timeout.total_seconds()
            if time.monotonic() - began < 0.9 * limit:
                raise

            raise StoreTimeoutError(f"not every rank had come after {seconds(limit)}: {error}") from error

        if self._steps:
            self._store()

        self._waited = True
        return True

    def outcome(self, device: torch.device) -> None:
        """Wait on the host until it is over, from any thread; for the end of a group.

        :param device: where it runs.
        :raises RuntimeError: if it failed, or was ended because its time was over.
        """
        if isinstance(self._work, ForeignWork):
            self._work.outcome(device)
            return

        if not self._cuda:
            self._work.wait(timedelta(seconds=max(0.001, self._began + self._timeout - time.monotonic())))
            return

        # Not its wait(), which lets go of the tensors that the kernel still reads, and not its future, which some of
        # NCCL's calls have none of. The kernel ends in any case: torch's watchdog ends it at its deadline.
        torch.cuda.synchronize(device)
        self.check_end()

    def check_end(self) -> None:
        """Of NCCL's, once its kernel is over: one that the watchdog has ended looks as if it had gone well, but here.

        :raises RuntimeError: if that is so.
        """
        if hasattr(self._work, "get_future_result"):
            told = self._work.get_future_result()
            if told.done() and told.value() != 0:
                raise RuntimeError("torch's watchdog has ended it: its time was over, or the communicator failed")

    def is_completed(self) -> bool:
        """It is over, or was waited for: some are over in a wait alone, and on CUDA the result can be used then."""
        return self._waited or self._work.is_completed()

    def is_under_way(self) -> bool:
        """Its kernel may still run."""
        return not self._work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Done when the results are where they belong."""
        if self._lazy:
            return future_of(self.wait, "waits for a work")

        if self._cuda and self._one_sided is not None:
            devices = [tensor.device for tensor in self._one_sided]
            done: torch.futures.Future[Any] = torch.futures.Future(devices=devices or None)  # type: ignore[arg-type]
            try:
                self.wait()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(list(self._one_sided))

            return done

        def store(future: torch.futures.Future[Any]) -> Any:  # noqa: ANN401
            if self._steps:
                self._store()

            return future.value()

        return self._work.get_future().then(store)

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def _store(self) -> None:
        with self._lock:
            if self._stored is None:
                with torch.inference_mode(self._inference):
                    for step in self._steps:
                        step()

                self._stored = [streams.record(target) for target in self._written]
                return

        for event, target in zip(self._stored, self._written, strict=True):
            streams.order_after(event, target)


class Queued:
    """A Work of NCCL's that nobody is given: what the end of a group asks of its last one."""

    __slots__ = ("_timeout", "_work")

    def __init__(self, work: dist.Work, timeout: float) -> None:
        self._work, self._timeout = work, timeout

    def is_under_way(self) -> bool:
        """As :meth:`ForeignWork.is_under_way`."""
        return not self._work.is_completed()

    def outcome(self, device: torch.device) -> None:
        """As :meth:`ForeignWork.outcome`."""
        ForeignWork(self._work, self._timeout, True).outcome(device)


class Over:
    """A Work of something that is over."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_under_way(self) -> bool:
        """It is not."""
        return False

    def outcome(self, device: torch.device) -> None:
        """It went well."""

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future
