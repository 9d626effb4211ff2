"""The conformance kit: what every backend is held to, whoever wrote it.

A backend's author installs the plugin and writes::

    class TestMyStore(TensorStoreTests):
        backend = "mine"

All else, also which capabilities are tested, comes from the installed entry point. Needs pytest; nothing else of
this project does.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dtorch_core.testing._harness import DEVICES, Background, Conformance, asleep, requires, run_ranks, undeclared
    from dtorch_core.testing._run import Outcome, run_kit
    from dtorch_core.testing.groups import ThreadGroupTests
    from dtorch_core.testing.promises import PromiseTests
    from dtorch_core.testing.stores import TensorStoreTests

_HOMES = {
    "_harness": "DEVICES Background Conformance asleep requires run_ranks undeclared",
    "_run": "Outcome run_kit",
    "groups": "ThreadGroupTests",
    "promises": "PromiseTests",
    "stores": "TensorStoreTests",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "DEVICES",
    "Background",
    "Conformance",
    "Outcome",
    "PromiseTests",
    "TensorStoreTests",
    "ThreadGroupTests",
    "asleep",
    "requires",
    "run_kit",
    "run_ranks",
    "undeclared",
]

# Asserts in the kit show their values as those in a test file do.
_modules = (path.stem for path in Path(__file__).parent.glob("*.py"))
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _modules if module != "__init__"))


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
