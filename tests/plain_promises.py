"""The smallest promise backend there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dtorch_core import (
    BackendContext,
    BackendSpec,
    ProtocolError,
    Support,
    TensorFuture,
    TensorPromise,
    hookimpl,
    make_promise,
    register,
    unregister,
)

ALL = frozenset({"cpu", "cuda", "await"})


class Plain(TensorPromise):
    """A promise whose future is in its own hands."""

    def __init__(self, ctx: BackendContext, home: Plains, ended: TensorFuture) -> None:
        self.home, self.ended, self.taken = home, ended, home.taken.setdefault(ended.label, [])
        super().__init__(ctx, ended.label)

    def take_future(self):
        self.taken.append(True)
        if len(self.taken) > 1:
            raise ProtocolError(f"future() of {self.label}: it was taken already")

        return self.ended

    def cancelled(self):
        return self.ended.cancelled()

    def deliver(self, outcome):
        self.ended.settle(outcome)

    def hand_over(self):
        self.home.tokens[self.label.encode()] = self.ended
        return self.label.encode()


class Plains:
    """Its factory, with no lock and no clean-up."""

    made = 0

    def __init__(self, ctx: BackendContext) -> None:
        self.ctx = ctx
        self.count = 0
        self.tokens: dict[bytes, TensorFuture] = {}
        self.taken: dict[str, list[bool]] = {}

    def create(self):
        self.count += 1
        return Plain(self.ctx, self, TensorFuture(f"promise {self.count}"))

    def attach(self, token):
        try:
            return Plain(self.ctx, self, self.tokens.pop(token))
        except KeyError:
            raise ProtocolError(f"no promise waits for {token!r}") from None


def probe(topology: object) -> Support:
    return Support.yes(1, "the tests want it so") if len(topology) == 1 else Support.no("it is one thread's")


@contextmanager
def installed(name: str = "plain", factory: str = "Plains", capabilities: frozenset[str] = ALL) -> Iterator[None]:
    """A plugin that offers one promise backend, made by ``factory`` of this file."""

    class Plugin:
        @hookimpl
        def dtorch_register_promises(self):
            return [BackendSpec(name, f"{__name__}:{factory}", probe, capabilities=capabilities)]

    register(Plugin(), name=name)
    try:
        yield
    finally:
        unregister(name)


@pytest.fixture(autouse=True, scope="module")
def plain() -> Iterator[None]:
    with installed():
        yield


def pair() -> tuple[TensorPromise, TensorFuture]:
    promise = make_promise(backend="plain")
    return promise, promise.future()
