"""Collectives over NCCL for PyTorch ranks that each have their own GPU.

Importing this makes ``torch.distributed`` know the backend ``"dtorch"``; ``"nccl"`` stays torch's own. It imports no
torch.
"""

from dtorch_core import torch_backends

__version__ = "0.1.0"

torch_backends.register_any()
