"""Which backend a promise gets, who may say so, and that each is built once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from dtorch_core import (
    BackendConflictError,
    BackendContext,
    BackendSpec,
    NoBackendError,
    PluginError,
    ProtocolError,
    Selection,
    Support,
    TensorFuture,
    TensorPromise,
    Topology,
    attach_promise,
    hookimpl,
    make_promise,
    register,
    unregister,
    use_backend,
)
from dtorch_core.testing import Background, asleep

PATIENCE = 20.0


class Promise(TensorPromise):
    def __init__(self, ctx: BackendContext) -> None:
        self.ended = TensorFuture("promise 1")
        super().__init__(ctx, "promise 1")

    def take_future(self):
        return self.ended

    def cancelled(self):
        return False

    def deliver(self, outcome):
        self.ended.settle(outcome)

    def hand_over(self):
        return b"the only one"


class Promises:
    """Counts how often it is built, and with what."""

    contexts: list[BackendContext] = []

    def __init__(self, ctx: BackendContext) -> None:
        self.contexts.append(ctx)
        self.ctx = ctx

    def create(self):
        return Promise(self.ctx)

    def attach(self, token):
        return Promise(self.ctx)


class Slow(Promises):
    """Is at work until it is let go; fails where the tests want it to."""

    contexts: list[BackendContext] = []
    go = threading.Event()
    fails = 0

    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx)
        assert self.go.wait(PATIENCE)
        if type(self).fails:
            type(self).fails -= 1
            raise ZeroDivisionError("the factory fails on purpose")


class Recursive(Promises):
    contexts: list[BackendContext] = []

    def __init__(self, ctx: BackendContext) -> None:
        make_promise(backend="it")


class MakesTensors(Promises):
    contexts: list[BackendContext] = []

    def create(self):
        return torch.arange(3)


def nothing_at_all(ctx: BackendContext) -> list[object]:
    return []


def anything(topology: Topology) -> Support:
    return Support.yes(1, "it takes anything")


def one_thread(topology: Topology) -> Support:
    return Support.yes(1, "one process") if topology.same_process else Support.no("the writer is in another process")


@contextmanager
def installed(name="it", factory="Promises", probe=anything, distribution="by hand", **hooks) -> Iterator[None]:
    class Plugin:
        @hookimpl
        def dtorch_register_promises(self):
            return [BackendSpec(name, f"{__name__}:{factory}", probe, capabilities=frozenset({"cpu", "await"}))]

    for hook, function in hooks.items():
        setattr(Plugin, hook, hookimpl(function))

    key = f"{name} of {distribution}"
    register(Plugin(), name=key, distribution=distribution)
    try:
        yield
    finally:
        unregister(key)


@pytest.fixture(autouse=True)
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch_core._promise_backends._built", {})
    monkeypatch.setattr("dtorch_core._promise_backends._choices", (None, {}))
    monkeypatch.delenv("DTORCH_PROMISE", raising=False)
    for factory in (Promises, Slow, Recursive, MakesTensors):
        monkeypatch.setattr(factory, "contexts", [])

    monkeypatch.setattr(Slow, "go", threading.Event())
    monkeypatch.setattr(Slow, "fails", 0)


class TestChoice:
    def test_reach_decides_what_the_probes_see(self) -> None:
        seen: list[Topology] = []

        def watching(topology: Topology) -> Support:
            seen.append(topology)
            return Support.yes(1, "it takes anything")

        with installed(probe=watching):
            for reach in ("thread", "process"):
                make_promise(reach=reach, backend="it").set_result(None)

        thread, process = seen
        assert len(thread) == 1
        assert (len(process), process.same_host, process.same_process) == (2, True, False)

    def test_reach_that_nothing_has(self) -> None:
        with installed(probe=one_thread), pytest.raises(NoBackendError) as refused:
            make_promise(reach="process", backend="it")

        assert "make_promise(reach='process')" in str(refused.value)
        assert "the writer is in another process" in str(refused.value)

    def test_reach_of_a_host_is_reserved(self) -> None:
        with installed(probe=one_thread), pytest.raises(NoBackendError, match="reserved"):
            make_promise(reach="host")

    @pytest.mark.parametrize("reach", ["galaxy", None, 1])
    def test_reach_that_is_none(self, reach: object) -> None:
        with pytest.raises(ValueError, match="'thread' or 'process'"):
            make_promise(reach=reach)

    def test_device_that_is_not_here(self) -> None:
        with pytest.raises(ValueError, match="device"):
            make_promise(device="cuda:99")

    def test_name_by_argument_context_and_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with installed("it"), installed("other"):
            monkeypatch.setenv("DTORCH_PROMISE", "other")
            by_environment = make_promise()
            with use_backend(promise="it"):
                by_context = make_promise()
                by_argument = make_promise(backend="other")

            after = make_promise()

        made = [by_environment, by_context, by_argument, after]
        assert [promise.backend for promise in made] == ["other", "it", "other", "other"]
        assert [promise.selection.asked_by for promise in made] == [
            "environment DTORCH_PROMISE",
            "use_backend",
            "argument",
            "environment DTORCH_PROMISE",
        ]
        for promise in made:
            promise.set_result(None)

    def test_name_that_nobody_has(self) -> None:
        with installed("it"), pytest.raises(NoBackendError, match="nobody_has_this"):
            make_promise(backend="nobody_has_this")

    def test_choice_is_announced_once(self) -> None:
        """A promise is made for every request; its hooks are for every choice."""
        announced: list[Selection] = []

        def observer(self, selection):
            announced.append(selection)

        with installed(dtorch_backend_selected=observer):
            first = make_promise(backend="it")
            for promise in (first, *(make_promise(backend="it") for _ in range(3))):
                assert promise.selection is first.selection
                promise.set_result(None)

        assert announced == [first.selection]

    def test_choice_is_made_anew_when_the_plugins_change(self) -> None:
        with installed("it"):
            first = make_promise(backend="it")
            with installed("other"):
                second = make_promise(backend="it")

        assert [verdict.name for verdict in first.selection.verdicts if verdict.state == "yes"].count("other") == 0
        assert "other" in [verdict.name for verdict in second.selection.verdicts]
        assert len(Promises.contexts) == 1, "the same backend is not built again"
        first.set_result(None)
        second.set_result(None)


class TestFactory:
    def test_factory_is_told_where_it_is(self) -> None:
        with installed():
            make_promise(backend="it").set_result(None)

        (ctx,) = Promises.contexts
        assert (ctx.kind, ctx.rank, ctx.world_size, ctx.device) == ("promise", 0, 1, "cpu")
        assert ctx.selection.chosen == "it"
        ctx.rendezvous.set("k", "v")
        assert ctx.rendezvous.get("k") == b"v"
        with pytest.raises(ProtocolError, match="no ranks"):
            ctx.open_store("s")

    def test_factory_is_called_once_by_threads_that_come_together(self) -> None:
        with installed(factory="Slow"):
            makers = [Background(lambda: make_promise(backend="it")) for _ in range(5)]
            for maker in makers:
                asleep(maker)

            assert len(Slow.contexts) == 1
            Slow.go.set()
            for maker in makers:
                maker.result(PATIENCE).set_result(None)

            make_promise(backend="it").set_result(None)

        assert len(Slow.contexts) == 1

    def test_factory_at_work_holds_no_lock(self) -> None:
        """Another backend, and another choice of the same, go on meanwhile."""
        with installed(factory="Slow"), installed("other"):
            maker = Background(lambda: make_promise(backend="it"))
            asleep(maker)
            assert len(Slow.contexts) == 1
            Background(lambda: make_promise(backend="other")).result(PATIENCE).set_result(None)
            Slow.go.set()
            maker.result(PATIENCE).set_result(None)

    def test_factory_that_fails_is_called_again(self) -> None:
        """Each caller gets its own error; the next one may have more luck."""
        Slow.fails = 2
        with installed(factory="Slow"):
            makers = [Background(lambda: make_promise(backend="it")) for _ in range(3)]
            for maker in makers:
                asleep(maker)

            Slow.go.set()
            ends: list[object] = []
            for maker in makers:
                try:
                    ends.append(type(maker.result(PATIENCE)))
                except ZeroDivisionError as error:
                    ends.append(type(error))

            assert sorted(ends, key=str) == sorted([ZeroDivisionError, ZeroDivisionError, Promise], key=str)
            make_promise(backend="it").set_result(None)

        assert len(Slow.contexts) == 3

    def test_factory_that_makes_promises_is_refused(self) -> None:
        with installed(factory="Recursive"), pytest.raises(PluginError, match="makes promises itself"):
            make_promise(backend="it")

    @pytest.mark.parametrize(
        ("factory", "why"),
        [("nothing_at_all", "no create"), ("MakesTensors", "not a TensorPromise"), ("Nowhere", "imported")],
    )
    def test_factory_that_returns_no_promises_is_named(self, factory: str, why: str) -> None:
        with installed(factory=factory), pytest.raises(PluginError, match=f"'it'.*{why}"):
            make_promise(backend="it")


class TestToken:
    def test_token_finds_the_object_that_made_it(self) -> None:
        with installed():
            token = make_promise(backend="it").serialize()
            worker = attach_promise(token)

        assert len(Promises.contexts) == 1
        assert worker.selection.chosen == "it"
        assert "token" in worker.selection.asked_by
        worker.set_result(None)

    def test_token_finds_the_object_of_its_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of this process; a device of another process may not even exist here."""
        monkeypatch.setattr("dtorch_core._meeting.member.normal_device", lambda device: device or "cpu")
        monkeypatch.setattr("dtorch_core._meeting.member._uuid", lambda device: "")
        with installed():
            token = make_promise(backend="it", device="cuda:7").serialize()
            attach_promise(token).set_result(None)
            assert [ctx.device for ctx in Promises.contexts] == ["cuda:7"]
            attach_promise(token.replace(b"cuda:7", b"cuda:9")).set_result(None)
            assert [ctx.device for ctx in Promises.contexts] == ["cuda:7", "cpu"]

    def test_token_is_enough_where_nothing_was_made(self) -> None:
        """The worker's process: it has made no promise, and its probe need not fit."""
        with installed():
            token = make_promise(backend="it").serialize()

        def no(topology: Topology) -> Support:
            return Support.no("not for a single thread")

        with installed(probe=no):
            attach_promise(token).set_result(None)

        assert [ctx.kind for ctx in Promises.contexts] == ["promise"] * 2

    def test_token_of_a_backend_that_is_gone(self) -> None:
        with installed():
            token = make_promise(backend="it").serialize()

        with pytest.raises(NoBackendError, match="'it'.*token"):
            attach_promise(token)

    def test_token_of_a_backend_in_conflict(self) -> None:
        with installed():
            token = make_promise(backend="it").serialize()

        with ExitStack() as stack, pytest.raises(BackendConflictError, match="one.*two"):
            stack.enter_context(installed(distribution="one"))
            stack.enter_context(installed(distribution="two"))
            attach_promise(token)

    def test_token_does_not_follow_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with installed("it"), installed("other"):
            token = make_promise(backend="it").serialize()
            monkeypatch.setenv("DTORCH_PROMISE", "other")
            with use_backend(promise="other"):
                worker = attach_promise(token)

        assert worker.backend == "it"
        worker.set_result(None)
