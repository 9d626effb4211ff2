"""Collectives for PyTorch ranks that share one device.

Importing this makes ``torch.distributed`` know the backends ``"samedevice"`` and ``"dtorch"``. It imports no torch.
"""

from dtorch_core import torch_backends

__version__ = "0.1.0"


def register() -> None:
    """The entry point in ``torch.distributed.backends``: what importing this has done."""
    torch_backends.register("samedevice")


register()
