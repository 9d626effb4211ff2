"""A promise backend without a mistake."""

from __future__ import annotations

from dtorch_core import BackendContext, ProtocolError, TensorFuture, TensorPromise


class Right(TensorPromise):
    """No mistake. Each wrong promise below changes one thing, in itself or in its future."""

    future_type: type[TensorFuture] = TensorFuture

    def __init__(self, ctx: BackendContext, home: Home, slot: Slot) -> None:
        self.home, self.slot = home, slot
        super().__init__(ctx, slot.future.label)

    def take_future(self):
        if self.slot.taken:
            raise ProtocolError(f"future() of {self.label}: it was taken already")

        self.slot.taken = True
        return self.slot.future

    def cancelled(self):
        return self.slot.future.cancelled()

    def deliver(self, outcome):
        self.slot.future.settle(outcome)

    def hand_over(self):
        token = f"token of {self.label}".encode()
        self.home.tokens[token] = self.slot
        return token


class Slot:
    def __init__(self, future: TensorFuture) -> None:
        self.future = future
        self.taken = False


class Home:
    """The factory of every backend here: ``promise_type`` says what it makes."""

    promise_type: type[Right] = Right

    def __init__(self, ctx: BackendContext) -> None:
        self.ctx = ctx
        self.count = 0
        self.tokens: dict[bytes, Slot] = {}

    def create(self):
        self.count += 1
        return self.promise_type(self.ctx, self, Slot(self.promise_type.future_type(f"promise {self.count}")))

    def attach(self, token):
        if token not in self.tokens:
            raise ProtocolError("no promise waits for this token")

        return self.promise_type(self.ctx, self, self.tokens.pop(token))
