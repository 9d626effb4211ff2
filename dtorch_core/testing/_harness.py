"""What the three kits share: capabilities, devices, runs that are bounded in time, and the check for leftovers."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch

from dtorch_core._meeting.member import normal_device
from dtorch_core._selection.reasons import CAPABILITIES, BackendSpec, Kind
from dtorch_core._selection.registry import registry
from dtorch_core.errors import NoBackendError, StoreTimeoutError
from dtorch_core.launcher import spawn
from dtorch_core.testing._held import Held, left_behind

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT = 30.0
"""Seconds that anything in the kit may take. A right backend needs a fraction of it."""

STARTUP = 30.0
"""Seconds that new processes may take to import what they need, on a busy machine."""

DEVICES: tuple[str, ...] = (
    (os.environ["DEVICE"],)
    if os.environ.get("DEVICE")
    else ("cpu", "cuda:0")
    if torch.cuda.is_available()
    else ("cpu",)
)
"""The devices to run on: the one that the environment variable DEVICE names, else the CPU and, if there, a GPU."""

CUDA = next((device for device in DEVICES if device.startswith("cuda")), "cuda:0")
"""The GPU for tests that need one."""


def requires(*words: str) -> Callable[[F], F]:
    """Mark a test as one of the capabilities ``words``: it runs where all are declared, and is skipped elsewhere.

    ``"cuda"`` is skipped, too, on a machine without a GPU. The words are kept as ``test.capabilities``.
    """
    return _mark("capabilities", words)


def undeclared(*words: str) -> Callable[[F], F]:
    """Mark a test as one for backends that declare none of ``words``: what they must refuse."""
    return _mark("undeclared", words)


def thorough(test: F) -> F:
    """Mark a test as one of what the contract does not ask of every backend: see :attr:`Conformance.thorough`."""
    setattr(test, "thorough", True)  # noqa: B010 - a function has no such attribute
    return test


@cache
def torch_copies(dtype: torch.dtype) -> bool:
    """There is a kernel: dtypes of less than a byte have none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.empty(2, dtype=dtype, device="cpu").clone()
    except RuntimeError:
        return False

    return True


def _mark(attribute: str, words: Sequence[str]) -> Callable[[F], F]:
    unknown = set(words) - frozenset[str]().union(*CAPABILITIES.values())
    if unknown:
        raise ValueError(f"no such capability: {', '.join(sorted(unknown))}")

    def mark(test: F) -> F:
        setattr(test, attribute, frozenset(words))
        return test

    return mark


class _Declared:
    """The capabilities that the installed plugin declares for a kit's backend, read when they are asked for."""

    def __get__(self, instance: object, owner: type[Conformance]) -> frozenset[str]:
        return installed_spec(owner.kind, owner.backend).capabilities


class Conformance:
    """Base of the three kits. A subclass of a kit sets ``backend`` and is then a class of tests."""

    backend: ClassVar[str] = ""
    """The backend's name, as its plugin gives it."""
    kind: ClassVar[Kind]
    declared = _Declared()
    """What the backend declares, a ``frozenset[str]``: it is held to these words."""
    thorough: ClassVar[bool] = False
    """It is held to more than the contract asks: dtypes and views that torch itself can't copy arrive too, subclasses
    arrive as plain tensors, memory that overlaps itself is not lent to be written, and memory that can't be had is a
    NoRoomError."""
    patience: ClassVar[float] = TIMEOUT
    """Seconds until a test that hangs is ended."""

    @pytest.fixture(autouse=True)
    def _contract(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Skip what is not declared, or can't run here; afterwards nothing may be left."""
        self._skip_unless_declared(request.function)
        _wake_driver()
        if "multi_process" in self.declared:
            _wake_helpers()

        before = Held.now()
        yield
        left = left_behind(before, min(5.0, self.patience))
        if left:
            pytest.fail("the test left behind: " + ", ".join(left))

    @pytest.fixture(params=DEVICES)
    def device(self, request: pytest.FixtureRequest) -> str:
        """Each device in turn that the backend declares."""
        device = normal_device(request.param)
        kind = device.partition(":")[0]
        if kind not in self.declared:
            pytest.skip(f"{self.kind} backend {self.backend!r} does not declare {kind!r}")

        return device

    def _skip_unless_declared(self, test: object) -> None:
        who = f"{self.kind} backend {self.backend!r}"
        needed: frozenset[str] = getattr(test, "capabilities", frozenset())
        if needed - self.declared:
            pytest.skip(f"{who} does not declare {', '.join(map(repr, sorted(needed - self.declared)))}")

        if getattr(test, "thorough", False) and not self.thorough:
            pytest.skip(f"{who} is held to the contract, and this is more")

        excluded: frozenset[str] = getattr(test, "undeclared", frozenset())
        if excluded & self.declared:
            pytest.skip(f"{who} declares {', '.join(map(repr, sorted(excluded & self.declared)))}")

        if "cuda" in needed and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")

    def carried(self, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
        """Those that this backend has to carry."""
        return [dtype for dtype in dtypes if self.thorough or torch_copies(dtype)]

    def test_kit_is_complete(self) -> None:
        """A subclass may expect a test to fail, with a reason; it can't replace or drop one."""
        for cls in type(self).__mro__:
            for name, test in vars(cls).items() if issubclass(cls, Conformance) else ():
                if cls.__module__.startswith(f"{__package__}.") and name.startswith("test_"):
                    used = getattr(type(self), name)
                    marks = [mark for mark in getattr(used, "pytestmark", ()) if mark.name == "xfail"]
                    excused = any(mark.kwargs.get("reason") for mark in marks)
                    assert used is test or excused, f"{name} is replaced; mark it xfail(reason=...) instead"


@cache
def _wake_driver() -> None:
    """The driver's own threads and files come now, not in a test."""
    for number in range(torch.cuda.device_count()):
        for peer in range(torch.cuda.device_count()):
            torch.zeros(1, device=f"cuda:{number}").to(f"cuda:{peer}").cpu()


@cache
def _wake_helpers() -> None:
    """So do what multiprocessing keeps, and what the server of a rendezvous does."""
    resource_tracker.ensure_running()
    torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def installed_spec(kind: Kind, name: str) -> BackendSpec:
    """What the installed plugin offers under ``name``.

    :raises NoBackendError: if not exactly one plugin does.
    """
    offers = registry().offers(kind)
    if len(offers.get(name, ())) != 1:
        raise NoBackendError(
            f"the kit needs one installed plugin with the {kind} backend {name!r}, and there are "
            f"{len(offers.get(name, ()))} (known: {', '.join(sorted(offers)) or 'none'}); see dtorch plugins"
        )

    return offers[name][0].spec


class Background(Generic[T]):
    """A call in a thread of its own; :meth:`result` waits for it, never longer than it says."""

    def __init__(self, call: Callable[[], T], name: str = "background") -> None:
        self._call = call
        self._result: T | None = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def result(self, timeout: float = TIMEOUT) -> T:
        """What the call returned; raises what it raised. Late: the test fails, with every thread's traceback."""
        self.thread.join(timeout)
        if self.thread.is_alive():
            dump_threads()
            pytest.fail(f"{self.thread.name} had not returned after {timeout:g} s; every thread's stack is on stderr")

        if self._error is not None:
            raise self._error

        return self._result  # type: ignore[return-value]

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error


def asleep(background: Background[Any], within: float = 2.0) -> None:
    """Return once the call seems to be blocked, or has ended: the scheduler has not run its thread for a while.

    No event tells that another thread has gone to sleep. A wrong guess makes a test weaker, never wrong.
    (``sys._current_frames()`` would tell more, but can deadlock with the garbage collector.)
    """
    thread, deadline = background.thread, time.monotonic() + within
    status, before = Path(f"/proc/self/task/{thread.native_id}/status"), ""
    while thread.is_alive() and time.monotonic() < deadline:
        # A thread that only wants the GIL is run once in every switch interval.
        thread.join(2 * sys.getswitchinterval())
        try:
            now = "".join(line for line in status.read_text().splitlines() if line.startswith(("State", "vol", "nonv")))
        except OSError:
            now = "unknown"

        if now == before:
            return

        before = now


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    timeout: float = TIMEOUT,
    *,
    args: Sequence[object] = (),
    devices: str | Sequence[str] | None = None,
    ranks_as: str = "threads",
    threads_per_process: int = 1,
) -> list[T]:
    """``spawn(fn, world_size)`` that ends in time whatever the backend does: ``fn(ctx, *args)`` on every rank.

    As processes, they have :data:`STARTUP` seconds more, and ``fn`` has to be at a module's level. Late: every thread's
    traceback goes to stderr (of this process alone), and the test fails.

    :raises RankFailedError: if a rank raised, as spawn does.
    """

    if ranks_as == "processes":
        timeout += STARTUP

    def run() -> list[T]:
        return spawn(
            fn,
            world_size,
            args=args,
            ranks_as=ranks_as,
            threads_per_process=threads_per_process,
            devices=devices,
            timeout=timeout + 0.5,
        )

    watch = threading.Timer(timeout, dump_threads)  # before the run is ended: shows where each rank hangs
    watch.daemon = True
    watch.start()
    try:
        # In a thread: ending a run calls the backend's abort(), which may hang as well.
        return Background(run, f"spawn of {world_size}").result(timeout + 10)
    except StoreTimeoutError as late:
        pytest.fail(f"{late}; every thread's stack is on stderr")
    finally:
        watch.cancel()
        watch.join()


def dump_threads() -> None:
    """The traceback of every thread to stderr."""
    for stream in (sys.stderr, sys.__stderr__):
        try:
            faulthandler.dump_traceback(stream, all_threads=True)  # type: ignore[arg-type]
            return
        except (OSError, ValueError, AttributeError, RuntimeError):
            continue  # replaced by something without a file descriptor
