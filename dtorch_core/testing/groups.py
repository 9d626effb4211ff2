"""What every ThreadGroup is held to."""

from __future__ import annotations

from dtorch_core.testing._group_async import AsyncTests
from dtorch_core.testing._group_collectives import CollectiveTests
from dtorch_core.testing._group_cuda import CudaTests
from dtorch_core.testing._group_ending import EndingTests
from dtorch_core.testing._group_mismatch import MismatchTests
from dtorch_core.testing._group_out import OutTests
from dtorch_core.testing._group_p2p import MessageTests
from dtorch_core.testing._group_placement import PlacementTests
from dtorch_core.testing._group_reductions import ReductionTests
from dtorch_core.testing._group_split import SplitTests


class ThreadGroupTests(
    CollectiveTests,
    OutTests,
    ReductionTests,
    AsyncTests,
    MismatchTests,
    MessageTests,
    PlacementTests,
    SplitTests,
    EndingTests,
    CudaTests,
):
    """The contract of a ThreadGroup. Subclass it, set ``backend``, and pytest does the rest."""
