"""What every promise is held to."""

from __future__ import annotations

from dtorch_core.testing._promise_await import AwaitTests
from dtorch_core.testing._promise_cuda import StreamTests
from dtorch_core.testing._promise_ending import EndingTests
from dtorch_core.testing._promise_handover import HandOverTests
from dtorch_core.testing._promise_processes import ProcessTests
from dtorch_core.testing._promise_values import ValueTests
from dtorch_core.testing._promise_waiting import WaitingTests


class PromiseTests(ValueTests, WaitingTests, EndingTests, HandOverTests, AwaitTests, ProcessTests, StreamTests):
    """The contract of a promise. Subclass it, set ``backend``, and pytest does the rest."""
