"""What every TensorStore is held to."""

from __future__ import annotations

from dtorch_core.testing._store_built import BuiltTests
from dtorch_core.testing._store_capabilities import CapabilityTests
from dtorch_core.testing._store_cuda import CudaTests
from dtorch_core.testing._store_deadlines import DeadlineTests
from dtorch_core.testing._store_death import DeathTests
from dtorch_core.testing._store_exchange import ExchangeTests
from dtorch_core.testing._store_goodbye import GoodbyeTests
from dtorch_core.testing._store_joint import JointTests
from dtorch_core.testing._store_keys import KeyTests
from dtorch_core.testing._store_memory import MemoryTests
from dtorch_core.testing._store_messages import MessageTests
from dtorch_core.testing._store_mistakes import MistakeTests
from dtorch_core.testing._store_processes import ProcessRankTests
from dtorch_core.testing._store_reset import ResetTests
from dtorch_core.testing._store_threads import ThreadTests
from dtorch_core.testing._store_values import ValueTests
from dtorch_core.testing._store_writable import WritableTests


class TensorStoreTests(
    CapabilityTests,
    ExchangeTests,
    KeyTests,
    MistakeTests,
    ThreadTests,
    ValueTests,
    MemoryTests,
    WritableTests,
    BuiltTests,
    DeadlineTests,
    ResetTests,
    GoodbyeTests,
    DeathTests,
    MessageTests,
    JointTests,
    ProcessRankTests,
    CudaTests,
):
    """The contract of a TensorStore. Subclass it, set ``backend``, and pytest does the rest."""
