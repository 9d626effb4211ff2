"""What every TensorStore is held to."""

from __future__ import annotations

from dtorch_core.testing._store_capabilities import CapabilityTests
from dtorch_core.testing._store_cuda import CudaTests
from dtorch_core.testing._store_ending import EndingTests
from dtorch_core.testing._store_exchange import ExchangeTests
from dtorch_core.testing._store_joint import JointTests
from dtorch_core.testing._store_messages import MessageTests
from dtorch_core.testing._store_processes import ProcessRankTests
from dtorch_core.testing._store_values import ValueTests


class TensorStoreTests(
    CapabilityTests, ExchangeTests, ValueTests, EndingTests, MessageTests, JointTests, ProcessRankTests, CudaTests
):
    """The contract of a TensorStore. Subclass it, set ``backend``, and pytest does the rest."""
