"""Promises that bring something else than was set."""

from __future__ import annotations

from dtorch_core import TensorFuture
from dtorch_core.promise import Outcome

from .base import Right


class SwallowsErrors(Right):
    def deliver(self, outcome):
        super().deliver(Outcome() if outcome.error is not None else outcome)


class HidesTypes(Right):
    def deliver(self, outcome):
        super().deliver(Outcome(outcome.tensor, error=outcome.error and RuntimeError(str(outcome.error))))


class GivesTheSameTensor(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            value = super().result(timeout)
            return self.__dict__.setdefault("kept", value)


class ChangesWhatItIsGiven(Right):
    def set_result(self, tensor, *, stream=None):
        super().set_result(tensor if tensor is None or tensor.is_leaf else tensor.detach_(), stream=stream)


class FlattensViews(Right):
    def deliver(self, outcome):
        tensor = outcome.tensor
        if tensor is not None and not tensor.is_contiguous():
            tensor = tensor.as_strided(tensor.shape, tensor.new_empty(tensor.shape).stride())

        super().deliver(Outcome(tensor, error=outcome.error))


class CutsLargeValues(Right):
    def deliver(self, outcome):
        tensor = outcome.tensor
        if tensor is not None and tensor.numel() > 1 << 22:
            tensor = tensor[:2048]

        super().deliver(Outcome(tensor, error=outcome.error))


class KeepsTheGradient(Right):
    def set_result(self, tensor, *, stream=None):
        super().set_result(tensor, stream=stream)
        self.slot.future.given = tensor

    class future_type(TensorFuture):
        def result(self, timeout=None):
            return super().result(timeout) if self.given is None else self.given


class TakesAnything(Right):
    def set_result(self, tensor, *, stream=None):
        with self._use("set_result", "it has been set already"):
            super().deliver(Outcome(tensor if tensor is None or hasattr(tensor, "detach") else None))


class BringsTheLatest(Right):
    def deliver(self, outcome):
        type(self).latest = outcome
        super().deliver(outcome)

    class future_type(TensorFuture):
        def result(self, timeout=None):
            super().result(timeout)
            tensor = BringsTheLatest.latest.tensor
            return None if tensor is None else tensor.detach()


class BringsOnce(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            value = super().result(timeout)
            return None if self.__dict__.setdefault("given", []).append(1) or len(self.given) > 1 else value


class GrowsTracebacks(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            error = self.exception(timeout)
            if error is not None:
                raise error

            return super().result(timeout)
