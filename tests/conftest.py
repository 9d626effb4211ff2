"""Real distributions for tests: metadata folders and modules on ``sys.path``, found as installed ones are."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtorch_core

# Shared by several test files, and their assertions say as much as those of the files do.
pytest.register_assert_rewrite(
    "four_steps", "opening_ranks", "process_runs", "script_runs", "thread_runs", "thread_world_ranks"
)

_numbers = itertools.count()


class Site:
    """A folder of installed distributions."""

    STORE = textwrap.dedent(
        """
        from dtorch_core import TensorStore

        class Store(TensorStore):
            opened, closed = [], []

            def __init__(self, ctx):
                super().__init__(ctx)
                self.context = ctx
                self.opened.append(self)

            def src_set(self, key, tensor, get_count, *, stream=None, dest_device=None, writable=False): ...
            def src_wait_until_get_finished(self, key, *, stream=None, timeout=None): ...
            def dest_get(self, key, *, stream=None, timeout=None): ...
            def dest_finish_get(self, key, *, stream=None): ...
            def reset(self, *, timeout=None): ...
            def barrier(self, *, timeout=None): ...
            def empty(self, size, *, dtype, device=None): ...

            def close(self):
                self.closed.append(self)
        """
    )
    """A module with a store that holds nothing: enough to be opened."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = patch
        self.modules: set[str] = set()

    def module(self, source: str, name: str | None = None) -> str:
        """Write a module and return its name, which no other one has."""
        name = name or f"plugin_{next(_numbers)}"
        (self.folder / f"{name}.py").write_text("from __future__ import annotations\n" + textwrap.dedent(source))
        self.modules.add(name)
        importlib.invalidate_caches()
        return name

    def metadata(
        self, distribution: str, files: dict[str, str], version: str = "1.0", folder: Path | None = None
    ) -> Path:
        """Write a metadata folder with these files."""
        name = distribution.replace("-", "_")
        info = (folder or self.folder) / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        for file, text in files.items():
            (info / file).write_text(textwrap.dedent(text))

        importlib.invalidate_caches()
        return info

    def add(
        self, distribution: str, source: str, *, plugin: str | None = None, version: str = "1.0", **where: Path
    ) -> str:
        """Install a distribution with one plugin, whose module is ``source``. Returns the module's name."""
        module = self.module(source)
        self.point(distribution, module, plugin=plugin, version=version, **where)
        return module

    def point(
        self, distribution: str, value: str, *, plugin: str | None = None, version: str = "1.0", **where: Path
    ) -> Path:
        """Install a distribution whose entry point has this value."""
        return self.metadata(
            distribution,
            {
                "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
                "entry_points.txt": f"[dtorch]\n{plugin or distribution} = {value}\n",
            },
            version,
            **where,
        )

    def backend(
        self,
        distribution: str,
        name: str,
        probe: str = "Support.yes(1000, 'it fits all')",
        *,
        factory: str = "",
        plugin: str = "",
    ) -> str:
        """Install a distribution with one store backend; ``probe`` is an expression of ``topology``."""
        factory = factory or f"{self.module(self.STORE)}:Store"
        source = f"""
            from dtorch_core import BackendSpec, Support, hookimpl

            @hookimpl
            def dtorch_register_tensor_stores():
                return [BackendSpec({name!r}, {factory!r}, lambda topology: {probe})]
        """
        return self.add(distribution, source, plugin=plugin or name)

    def also_on_path(self, folder: Path) -> Path:
        """Put another folder in front of ``sys.path``."""
        folder.mkdir(exist_ok=True)
        self._patch.syspath_prepend(str(folder))
        return folder

    def env(self, name: str, value: str | None) -> None:
        """Set a variable of the environment, or remove it."""
        if value is None:
            self._patch.delenv(name, raising=False)
        else:
            self._patch.setenv(name, value)

    @property
    def environment(self) -> dict[str, str]:
        """For other Python processes that are to see this site."""
        path = filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def loaded(self, module: str) -> object:
        """An imported module of this site."""
        return sys.modules[module]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """An empty site in front of ``sys.path``, without any DTORCH variable. Call ``dtorch_core.refresh()`` when done."""
    folder = tmp_path / "site"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("DTORCH_")]:
            patch.delenv(variable)

        patch.syspath_prepend(str(folder))
        made = Site(folder, patch)
        yield made

    for module in made.modules:
        sys.modules.pop(module, None)

    importlib.invalidate_caches()
    dtorch_core.refresh()
