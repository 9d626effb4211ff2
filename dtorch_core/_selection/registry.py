"""What is installed in this process: one snapshot, made at first use, replaced by :func:`refresh`.

No lock is held while a plugin is imported or called. Threads that arrive together may each load; the first to
finish publishes. (A lock held across an import deadlocks against Python's import locks.)
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from dtorch_core._selection import discovery, metadata
from dtorch_core._selection.discovery import Call, Plugin, Source, guarded
from dtorch_core._selection.reasons import KINDS, BackendSpec, Kind
from dtorch_core._text import describe_error
from dtorch_core.errors import PluginError

log = logging.getLogger("dtorch")

MOST_PROBLEMS = 100
"""How many problems a registry keeps: a hook whose message differs each time must not fill the memory."""

R = TypeVar("R")


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
    """Errors that hooks raised while in use, names in the environment that no plugin has, damaged metadata."""

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
                    others = " and ".join(other.plugin.label for other in offers if other is not offer)
                    reason = f"its {kind} backend {name!r} is also offered by {others}; neither is used"
                    why.setdefault(id(offer.plugin), []).append(reason)

        return tuple(
            replace(plugin, state="broken", why="; ".join(why[id(plugin)])) if id(plugin) in why else plugin
            for plugin in self.plugins
        )

    def call(
        self, hook: str, arguments: Mapping[str, object], check: Callable[[object], R]
    ) -> Iterator[tuple[Plugin, R]]:
        """Call a hook of one plugin after the other, as far as the caller iterates.

        ``check`` sees each result, may raise, and says what is given on. Errors are reported, not raised.
        """
        for plugin in self.plugins:
            for implementation in plugin.calls.get(hook, ()) if plugin.state == "ok" else ():
                result, error = guarded(_call_and_check, implementation, arguments, check)
                if error is None:
                    yield plugin, cast(R, result)
                else:
                    self.report(f"{hook} of {plugin.label}: {describe_error(error)}")

    def report(self, problem: str) -> None:
        """Keep a problem for ``dtorch doctor`` and log it, once."""
        if problem not in self.problems and len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)
            log.error("%s", problem)


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
_current_ticket = -1
_tickets = itertools.count()
_manual: dict[str, ManualSource] = {}
_local = threading.local()


def registry() -> Registry:
    """The current snapshot, made at first use.

    :raises PluginError: in strict mode, if a plugin is broken.
    """
    with _lock:
        current = _current

    return current if current is not None else _publish(keep=True)


def refresh() -> Registry:
    """Look for plugins anew, after an install or a change of the environment.

    :raises PluginError: in strict mode (``DTORCH_STRICT_PLUGINS=1``), if a plugin is broken.
    """
    return _publish(keep=False)


def inspect() -> Registry:
    """A snapshot for people to read, of its own: made in strict mode, too, where the others raise."""
    with _lock:
        by_hand = tuple(_manual.values())

    return _made(by_hand)


def register(plugin: object, *, name: str, distribution: str = "registered by hand", version: str = "") -> None:
    """Add a plugin without an entry point: for frozen applications, and for tests. It comes before installed ones.

    :raises ValueError: if ``name`` is registered already.
    :raises PluginError: in strict mode, if a plugin is broken; nothing is registered then.
    """
    value = getattr(plugin, "__name__", type(plugin).__name__)
    with _lock:
        if name in _manual:
            raise ValueError(f"a plugin {name!r} is registered already; unregister({name!r}) first")

        _manual[name] = ManualSource(name, value, distribution, version, plugin)

    try:
        refresh()
    except PluginError:
        with _lock:
            _manual.pop(name, None)

        raise


def unregister(name: str) -> None:
    """Take back a :func:`register`.

    :raises LookupError: if no plugin of that name was registered by hand.
    """
    with _lock:
        if _manual.pop(name, None) is None:
            raise LookupError(f"no plugin {name!r} was registered by hand (known: {', '.join(_manual) or 'none'})")

    refresh()


def _publish(*, keep: bool) -> Registry:
    """Make a snapshot current, unless another thread has published one meanwhile that began later.

    :param keep: one that began earlier is as good.
    """
    global _current, _current_ticket
    with _lock:
        ticket, by_hand = next(_tickets), tuple(_manual.values())

    made = _made(by_hand)
    if discovery.is_strict():
        for plugin in made.listing():
            if plugin.state == "broken":
                raise discovery.strict_error(plugin) from plugin.error

    with _lock:
        if _current is None or (ticket > _current_ticket and not keep):
            _current, _current_ticket = made, ticket

        return _current


def _made(by_hand: tuple[ManualSource, ...]) -> Registry:
    if getattr(_local, "loading", False):
        raise PluginError(
            "a plugin asked for the plugins while they are loaded; open and select nothing at import or in a "
            "registration hook"
        )

    _local.loading = True
    try:
        installed, damaged = metadata.entry_points()
        sources: list[Source] = [*by_hand, *installed]
        made = Registry(discovery.load(sources))
    finally:
        _local.loading = False

    for problem in [*damaged, *discovery.unknown_names(sources)]:
        made.report(problem)

    return made


def _call_and_check(implementation: Call, arguments: Mapping[str, object], check: Callable[[object], R]) -> R:
    return check(implementation(arguments))
