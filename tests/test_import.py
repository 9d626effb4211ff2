"""Importing the core imports neither torch nor a plugin, and nothing else that is slow."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import dtorch_core

LIGHT = [
    "dtorch_core",
    "dtorch_core.hookspecs",
    "dtorch_core.errors",
    "dtorch_core._selection.reasons",
    "dtorch_core._selection.topology",
    "dtorch_core._selection.discovery",
    "dtorch_core._selection.metadata",
    "dtorch_core._selection.registry",
    "dtorch_core._selection.selector",
    "dtorch_core._selection.authority",
    "dtorch_core._selection.catalogue",
    "dtorch_core._meeting.member",
    "dtorch_core.cli",
]
"""What works without torch."""


def modules_after(code: str) -> set[str]:
    """The modules that a fresh Python has imported after ``code``."""
    program = f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


class TestImport:
    def test_imports_no_torch_and_no_plugin(self):
        added = modules_after("import dtorch_core") - modules_after("")
        assert {name.partition(".")[0] for name in added} & {"torch", "numpy", "pluggy", "importlib_metadata"} == set()
        ours = {name for name in added if name.startswith("dtorch")}
        assert ours == {"dtorch_core"}
        # `import dtorch_core` takes under 100 ms because it imports next to nothing.
        assert len(added) < 60, sorted(added)

    @pytest.mark.parametrize("module", LIGHT)
    def test_module_imports_no_torch(self, module):
        assert "torch" not in modules_after(f"import {module}")

    def test_authors_need_no_torch(self):
        code = "from dtorch_core import BackendSpec, Support, Topology, hookimpl"
        assert "torch" not in modules_after(code)

    def test_listing_and_explaining_need_no_torch(self):
        code = (
            "import dtorch_core\n"
            "from dtorch_core._selection.topology import imagine\n"
            "for kind in ('store', 'group', 'promise'): dtorch_core.explain(kind, imagine(2))\n"
            "from dtorch_core._selection.registry import registry\n"
            "assert not any(plugin.imports_torch for plugin in registry().plugins)"
        )
        assert "torch" not in modules_after(code)


class TestNames:
    @pytest.mark.parametrize("name", dtorch_core.__all__)
    def test_public_name_is_there(self, name):
        assert getattr(dtorch_core, name).__module__.startswith(("dtorch_core", "pluggy"))

    def test_list_is_whole_and_sorted(self):
        assert dtorch_core.__all__ == sorted(dtorch_core._HOME)
        assert set(dtorch_core.__all__) <= set(dir(dtorch_core))

    def test_unknown_name(self):
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            dtorch_core.no_such_name  # noqa: B018

    @pytest.mark.parametrize("name", ["spawn", "open_store", "redistribute"])
    def test_name_that_needs_torch_says_so(self, name):
        code = f"import sys; sys.modules['torch'] = None\nfrom dtorch_core import {name}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stderr.splitlines()[-1] == (
            f"ModuleNotFoundError: dtorch_core.{name} needs torch: pip install torch"
        )

    def test_version_is_the_installed_one(self):
        import importlib_metadata

        assert dtorch_core.__version__ == importlib_metadata.version("dtorch-core")


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "builtin"),
        [
            ("NoBackendError", LookupError),
            ("BackendConflictError", Exception),
            ("NoRoomError", MemoryError),
            ("PluginVersionError", ImportError),
            ("StoreTimeoutError", TimeoutError),
            ("StoreTimeoutError", RuntimeError),
            ("PeerLostError", ConnectionError),
            ("PeerLostError", RuntimeError),
            ("ProtocolError", RuntimeError),
            ("KeyInUseError", dtorch_core.ProtocolError),
            ("CollectiveMismatchError", RuntimeError),
            ("BrokenPromiseError", RuntimeError),
            ("UnsupportedTensorError", TypeError),
            ("UnsupportedOperationError", NotImplementedError),
            ("AbortedError", RuntimeError),
            ("RankFailedError", RuntimeError),
        ],
    )
    def test_inherits_the_builtin_that_fits(self, error, builtin):
        kind = getattr(dtorch_core, error)
        assert issubclass(kind, (dtorch_core.DtorchError,)) and issubclass(kind, builtin)
        assert str(kind("it says")) == "it says"
