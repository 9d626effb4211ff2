"""Promise backends with one mistake each, and the test of the kit that has to catch it."""

from .base import Home, Right
from .caught import CAUGHT_BY
from .handing_over import AttachesAgain, UnpicklesTokens

__all__ = ["CAUGHT_BY", "AttachesAgain", "Home", "Right", "UnpicklesTokens"]
