"""Stores with one bug each: ``WRONG``, each marked with the kit's test that has to catch it."""

from . import (  # noqa: F401 - each adds to WRONG
    borrows,
    declarations,
    endings,
    gets,
    keys,
    leftovers,
    messages,
    posts,
    streams,
    tensors,
    together,
)
from .base import ALL, PATIENCE, WRONG
from .plugin import registered

__all__ = ["ALL", "PATIENCE", "WRONG", "registered"]
