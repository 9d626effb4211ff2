"""How ranks share a GPU of this machine best, for ``dtorch doctor``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SWITCH = 145
"""Microseconds that a GPU takes from one process to another. (Measured on an H200, driver 580.)"""


def report() -> list[str]:
    """Nothing where there is no GPU, or torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.device_count():
        return []

    if mps_runs():
        return ["ranks that share a GPU: NVIDIA MPS runs, so processes share it as threads of one process do"]

    return [
        f"ranks that share a GPU: threads of one process are the fast way; between processes each switch takes about "
        f"{SWITCH} us, and a collective at least two. Four and more threads take turns with the GIL for as long: then "
        f"processes are as fast. NVIDIA MPS, which does not run here, saves the switches: nvidia-cuda-mps-control -d"
    ]


def mps_runs() -> bool:
    """The control daemon of NVIDIA's Multi-Process Service listens where CUDA would look for it."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control").exists()
