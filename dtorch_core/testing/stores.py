"""What every TensorStore is held to."""

from __future__ import annotations

from dtorch_core.testing._store_ending import EndingTests
from dtorch_core.testing._store_exchange import ExchangeTests
from dtorch_core.testing._store_values import ValueTests


class TensorStoreTests(ExchangeTests, ValueTests, EndingTests):
    """The contract of a TensorStore. Subclass it, set ``backend``, and pytest does the rest."""
