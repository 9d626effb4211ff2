"""Promises that are waited for wrongly."""

from __future__ import annotations

import time

from dtorch_core import TensorFuture
from dtorch_core.promise import Outcome

from .base import Right


class LosesWhatIsLate(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            if not self.wait(timeout):
                self.settle(Outcome())

            return super().result(timeout)


class ForgetsToWake(Right):
    class future_type(TensorFuture):
        def wait(self, timeout=None):
            if not self.done():
                time.sleep(min(timeout or 1e9, 3.0))

            return self.done()


class RaisesAnotherTimeout(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            if not self.wait(timeout):
                raise RuntimeError("late")

            return super().result(timeout)


class ForgetsTheRun(Right):
    class future_type(TensorFuture):
        def _unless_aborted(self, sleeper):
            return False

        def result(self, timeout=None):
            return super().result(4.0 if timeout is None else timeout)
