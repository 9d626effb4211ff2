"""What is installed in this process: one snapshot, made at first use, replaced by :func:`refresh`.

No lock is held while a plugin is imported or called. Threads that arrive together may each load; the first to
finish publishes. (A lock held across an import deadlocks against Python's import locks.)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dtorch_core import _discovery
from dtorch_core._discovery import Plugin, Source
from dtorch_core._reasons import KINDS, BackendSpec, Kind
from dtorch_core._text import describe_error
from dtorch_core.hookspecs import PROJECT

log = logging.getLogger("dtorch")


@dataclass(frozen=True, slots=True)
class Offer:
    """One backend and the plugin that offers it."""

    spec: BackendSpec
    plugin: Plugin


@dataclass(frozen=True)
class Registry:
    """A snapshot of the plugins, and their hooks, each called alone."""

    plugins: tuple[Plugin, ...]
    problems: list[str] = field(default_factory=list)
    """Errors that hooks raised while in use, and names in the environment that no plugin has."""

    def offers(self, kind: Kind) -> dict[str, tuple[Offer, ...]]:
        """Backends of one kind by name. A name with more than one offer is in conflict."""
        offers: dict[str, tuple[Offer, ...]] = {}
        for plugin in self.plugins:
            for spec in plugin.specs.get(kind, ()) if plugin.state == "ok" else ():
                offers[spec.name] = (*offers.get(spec.name, ()), Offer(spec, plugin))

        return offers

    def broken(self) -> tuple[Plugin, ...]:
        """The plugins that could not be loaded."""
        return tuple(plugin for plugin in self.plugins if plugin.state == "broken")

    def listing(self) -> tuple[Plugin, ...]:
        """The plugins as a person should see them: one whose backend's name is taken twice is broken too."""
        why: dict[int, list[str]] = {}
        for kind in KINDS:
            for name, offers in self.offers(kind).items():
                for offer in offers if len(offers) > 1 else ():
                    others = [other.plugin.distribution for other in offers if other is not offer]
                    reason = f"its {kind} backend {name!r} is also offered by {' and '.join(others)}; neither is used"
                    why.setdefault(id(offer.plugin), []).append(reason)

        return tuple(
            replace(plugin, state="broken", why="; ".join(why[id(plugin)])) if id(plugin) in why else plugin
            for plugin in self.plugins
        )

    def call(
        self, hook: str, arguments: Mapping[str, Any], check: Callable[[Any], Any]
    ) -> list[tuple[Plugin, Any]]:
        """Call a hook of every plugin; ``check`` sees each result and may raise. Errors are reported, not raised."""
        results = []
        for plugin in self.plugins:
            if plugin.state != "ok" or hook not in plugin.hooks:
                continue

            for implementation in _discovery.hook_calls(plugin.module, hook):
                result, error = _discovery.guarded(lambda call=implementation: check(call(arguments)))
                if error is None:
                    results.append((plugin, result))
                else:
                    self.report(f"{hook} of {plugin.distribution}: {describe_error(error)}")

        return results

    def report(self, problem: str) -> None:
        """Keep a problem for ``dtorch doctor`` and log it, once."""
        if problem not in self.problems:
            self.problems.append(problem)
            log.error("%s", problem)


@dataclass(frozen=True, slots=True)
class EntryPointSource:
    """A plugin found through its distribution's entry point."""

    name: str
    value: str
    distribution: str
    version: str
    load: Callable[[], object]


@dataclass(frozen=True, slots=True)
class ManualSource:
    """A plugin handed to :func:`register`."""

    name: str
    value: str
    distribution: str
    version: str
    module: object

    def load(self) -> object:
        return self.module


_lock = threading.Lock()
_current: Registry | None = None
_manual: dict[str, ManualSource] = {}


def registry() -> Registry:
    """The current snapshot, made at first use."""
    with _lock:
        current = _current

    return current if current is not None else refresh(keep=True)


def refresh(*, keep: bool = False) -> Registry:
    """Look for plugins anew, after an install or a change of the environment. ``keep`` yields to a faster thread.

    :raises PluginError: in strict mode, if a plugin is broken.
    """
    global _current
    with _lock:
        manual: Sequence[Source] = tuple(_manual.values())

    sources: list[Source] = [*_installed(), *manual]
    made = Registry(_discovery.load(sources))
    for problem in _discovery.unknown_names(sources):
        made.report(problem)

    with _lock:
        if keep and _current is not None:
            return _current

        _current = made
        return made


def register(plugin: object, *, name: str, distribution: str = "registered by hand", version: str = "") -> None:
    """Add a plugin without an entry point: for frozen applications, and for tests.

    :raises ValueError: if ``name`` is registered already.
    """
    value = getattr(plugin, "__name__", type(plugin).__name__)
    with _lock:
        if name in _manual:
            raise ValueError(f"a plugin {name!r} is registered already; unregister({name!r}) first")

        _manual[name] = ManualSource(name, value, distribution, version, plugin)

    refresh()


def unregister(name: str) -> None:
    """Take back a :func:`register`.

    :raises LookupError: if no plugin of that name was registered by hand.
    """
    with _lock:
        if _manual.pop(name, None) is None:
            raise LookupError(f"no plugin {name!r} was registered by hand (known: {', '.join(_manual) or 'none'})")

    refresh()


def _installed() -> list[EntryPointSource]:
    import importlib_metadata  # costs 20 ms: not at import

    found: dict[tuple[str, str, str], EntryPointSource] = {}
    for point in importlib_metadata.entry_points(group=PROJECT):
        distribution = point.dist.name if point.dist is not None else "unknown distribution"
        version = point.dist.version if point.dist is not None else ""
        source = EntryPointSource(point.name, point.value, distribution, version, point.load)
        # One distribution seen twice (lib and lib64, an editable and its stale metadata) is one plugin.
        found.setdefault((distribution.lower().replace("_", "-"), point.name, point.value), source)

    return sorted(found.values(), key=lambda source: (source.name, source.distribution))
