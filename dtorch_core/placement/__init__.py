"""Brings tensors into the placements of ``torch.distributed.tensor``, and back, over a TensorStore."""

from __future__ import annotations

from dtorch_core.placement._copy import Layout, copy_tensor
from dtorch_core.placement._gather import gather_tensor
from dtorch_core.placement._scatter import scatter_tensor

__all__ = ["Layout", "copy_tensor", "gather_tensor", "scatter_tensor"]
