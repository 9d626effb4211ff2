"""Tensors and promises between the threads of one process, without a copy."""

__version__ = "0.1.0"
