"""Brings tensors into the placements of ``torch.distributed.tensor``, and from one to another.

Over a TensorStore: from one rank to many and back, and across meshes and devices. Over ThreadGroups: between
placements on the same ranks.
"""

from __future__ import annotations

from dtorch_core.placement._copy import Layout, copy_tensor
from dtorch_core.placement._gather import gather_tensor
from dtorch_core.placement._redistribute import plan_redistribution, redistribute, redistribute_mesh
from dtorch_core.placement._scatter import scatter_tensor

__all__ = [
    "Layout",
    "copy_tensor",
    "gather_tensor",
    "plan_redistribution",
    "redistribute",
    "redistribute_mesh",
    "scatter_tensor",
]
