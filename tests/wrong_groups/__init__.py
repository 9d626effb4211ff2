"""Groups with one bug each: ``WRONG``, each marked with the kit's test that has to catch it."""

from . import endings, messages, mismatches, reductions, streams, values, works  # noqa: F401 - each adds to WRONG
from .base import ALL, PATIENCE, WRONG, same_device

__all__ = ["ALL", "PATIENCE", "WRONG", "same_device"]
