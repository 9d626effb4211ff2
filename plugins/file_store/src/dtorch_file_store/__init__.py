"""Tensors and promises between the processes of one machine, in memory that they share."""

__version__ = "0.1.0"
