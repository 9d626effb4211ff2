"""Promises that end wrongly: dropped or cancelled."""

from __future__ import annotations

from dtorch_core import TensorFuture, TensorPromise
from dtorch_core.promise import Outcome

from .base import Right


class IsNeverBroken(Right):
    def __del__(self):
        pass


class BreaksSilently(Right):
    def deliver(self, outcome):
        super().deliver(Outcome() if "dropped" in str(outcome.error) else outcome)


class KeepsItself(Right):
    everyone: list[TensorPromise] = []

    def __init__(self, *args):
        super().__init__(*args)
        self.everyone.append(self)


class IgnoresCancel(Right):
    def cancelled(self):
        return False


class FailsTheWorkerOfACancelledFuture(Right):
    def set_result(self, tensor, *, stream=None):
        super().set_result(tensor, stream=stream)
        if self.cancelled():
            raise RuntimeError("nobody wants it")


class TellsNoStandardWait(Right):
    class future_type(TensorFuture):
        def cancel(self):
            self._told = True
            return super().cancel()
