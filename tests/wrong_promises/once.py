"""Promises that are set, or whose futures are given, more than once."""

from __future__ import annotations

import time

from dtorch_core import ProtocolError
from dtorch_core.promise import Outcome

from .base import Right


class SetsAgain(Right):
    def set_result(self, tensor, *, stream=None):
        self._right = None
        super().set_result(tensor, stream=stream)


class SetsWithoutALock(Right):
    def set_result(self, tensor, *, stream=None):
        if self._right is not None:
            raise ProtocolError("it has been set already")

        time.sleep(0.002)
        self.deliver(Outcome(None if tensor is None else tensor.detach()))
        self._right = "it has been set already"


class GivesManyFutures(Right):
    def take_future(self):
        return self.slot.future
