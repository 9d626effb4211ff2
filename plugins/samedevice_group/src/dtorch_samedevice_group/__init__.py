"""Collectives for PyTorch ranks that share one device."""

__version__ = "0.1.0"
