"""Promises whose right to set is handed over wrongly."""

from __future__ import annotations

import pickle

from dtorch_core import ProtocolError

from .base import Home, Right


class DropsWhatItHandedOver(Right):
    def hand_over(self):
        token = super().hand_over()
        self.given = True
        return token

    def __del__(self):
        if "given" in self.__dict__:
            self._right = None

        super().__del__()


class AttachesAgain(Home):
    """A token works as often as one likes."""

    def attach(self, token):
        if token not in self.tokens:
            raise ProtocolError("no promise waits for this token")

        return self.promise_type(self.ctx, self, self.tokens[token])


class UnpicklesTokens(Home):
    """Trusts what it is given."""

    def attach(self, token):
        return super().attach(pickle.loads(token))
