"""Finds plugins and loads each one alone, so that a broken one is listed with its root cause and stops nobody else.

pluggy's own entry-point loader is not used: it imports everything in one go and the first error ends it.
pluggy still checks each plugin: in a manager of its own, where half a registration can do no harm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import pluggy

from dtorch_core import hookspecs
from dtorch_core._reasons import CAPABILITIES, BackendSpec, Kind
from dtorch_core._text import describe_error, did_you_mean
from dtorch_core.errors import PluginError, PluginVersionError

REGISTRATION_HOOKS: dict[Kind, str] = {
    "store": "dtorch_register_tensor_stores",
    "group": "dtorch_register_thread_groups",
    "promise": "dtorch_register_promises",
}

DISABLE, LOAD, STRICT = "DTORCH_DISABLE_PLUGINS", "DTORCH_LOAD_PLUGINS", "DTORCH_STRICT_PLUGINS"

R = TypeVar("R")


class Source(Protocol):
    """An entry point, or what a caller registers by hand."""

    name: str
    value: str
    distribution: str
    version: str

    def load(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin and what became of it."""

    name: str
    distribution: str
    version: str
    value: str
    state: Literal["ok", "broken", "disabled"]
    why: str = ""
    error: BaseException | None = field(default=None, compare=False)
    module: object = field(default=None, compare=False)
    hooks: tuple[str, ...] = ()
    specs: Mapping[Kind, tuple[BackendSpec, ...]] = field(default_factory=dict)
    """What it offers; of a broken plugin, as far as that could be read."""

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The backends of one kind that this plugin stands for; its own name where they could not be read."""
        names = tuple(spec.name for specs in self.specs.values() for spec in specs)
        return tuple(spec.name for spec in self.specs.get(kind, ())) if names else (self.name,)

    def to_dict(self) -> dict[str, Any]:
        """What a person wants to know of it, as JSON values."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.value,
            "state": self.state,
            "why": self.why,
            "hooks": list(self.hooks),
            "backends": {
                kind: [{"name": spec.name, "capabilities": sorted(spec.capabilities)} for spec in specs]
                for kind, specs in self.specs.items()
                if specs
            },
        }


def guarded(call: Callable[..., R], *args: object) -> tuple[R | None, BaseException | None]:
    """Call a plugin's code: its result, or the error it raised, ``SystemExit`` included. Ctrl-C still gets through."""
    try:
        return call(*args), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def hook_calls(module: object, hook: str) -> list[Callable[[Mapping[str, Any]], Any]]:
    """``module``'s implementations of one hook, each taking the hook's arguments by name."""
    manager = _checked(module)
    caller = getattr(manager.hook, hook)
    return [
        lambda arguments, impl=impl: impl.function(*(arguments[name] for name in impl.argnames))
        for impl in reversed(caller.get_hookimpls())
    ]


def load(sources: Sequence[Source]) -> tuple[Plugin, ...]:
    """Load every plugin that the environment allows.

    :raises PluginError: in strict mode (``DTORCH_STRICT_PLUGINS=1``), if one of them is broken.
    """
    disabled = _names(DISABLE) or frozenset()
    allowed = _names(LOAD)
    plugins = []
    for source in sources:
        names = {source.name, source.distribution}
        if names & disabled:
            plugins.append(_plugin(source, "disabled", f"disabled by {DISABLE}"))
        elif allowed is not None and not names & allowed:
            plugins.append(_plugin(source, "disabled", f"not in {LOAD}"))
        else:
            plugins.append(_load_one(source))

    if os.environ.get(STRICT, "") not in ("", "0"):
        for plugin in plugins:
            if plugin.state == "broken":
                raise strict_error(plugin) from plugin.error

    return tuple(plugins)


def strict_error(plugin: Plugin) -> PluginError:
    """The error of a broken plugin, for callers that must not go on without it."""
    kind = PluginVersionError if isinstance(plugin.error, PluginVersionError) else PluginError
    return kind(
        f"plugin {plugin.name!r} of {plugin.distribution} {plugin.version} is broken: {plugin.why}\n"
        f"Repair or uninstall {plugin.distribution}, or set {DISABLE}={plugin.name}."
    )


def unknown_names(sources: Sequence[Source]) -> list[str]:
    """A sentence for each name in the environment's lists that no plugin has."""
    known = {name for source in sources for name in (source.name, source.distribution)}
    return [
        f"{variable} names {name!r}, but no such plugin is installed (known: {', '.join(sorted(known)) or 'none'})."
        + did_you_mean(name, known)
        for variable in (DISABLE, LOAD)
        for name in sorted((_names(variable) or frozenset()) - known)
    ]


def _names(variable: str) -> frozenset[str] | None:
    value = os.environ.get(variable)
    if value is None:
        return None

    return frozenset(name.strip() for name in value.split(",") if name.strip())


def _plugin(source: Source, state: Literal["ok", "broken", "disabled"], why: str = "", **more: Any) -> Plugin:  # noqa: ANN401
    return Plugin(source.name, source.distribution, source.version, source.value, state, why, **more)


def _load_one(source: Source) -> Plugin:
    module, error = guarded(source.load)
    if error is not None:
        return _plugin(source, "broken", describe_error(error), error=error)

    manager, error = guarded(_checked, module)
    if manager is None:
        return _plugin(source, "broken", str(error), error=error)

    hooks = tuple(caller.name for caller in manager.get_hookcallers(module) or ())
    specs: dict[Kind, tuple[BackendSpec, ...]] = {}
    for kind, hook in REGISTRATION_HOOKS.items():
        found, error = guarded(_specs, module, hook)
        specs[kind] = found or ()
        if error is None:
            _, error = guarded(_check_specs, kind, specs[kind])

        if error is not None:
            why = f"{hook}: {describe_error(error)}"
            return _plugin(source, "broken", why, error=error, module=module, hooks=hooks, specs=specs)

    return _plugin(source, "ok", module=module, hooks=hooks, specs=specs)


def _checked(module: object) -> pluggy.PluginManager:
    """A manager that holds this one plugin, all of whose hooks are known and have the right arguments."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(module)
    manager.check_pending()
    impls = [impl for caller in manager.get_hookcallers(module) or () for impl in caller.get_hookimpls()]
    if not impls:
        bare = [name for name in dir(module) if name.startswith("dtorch_") and hasattr(hookspecs, name)]
        hint = f"; {', '.join(bare)} lacks the @hookimpl decorator" if bare else ""
        raise PluginError(f"implements no hook{hint}")

    if any(impl.hookwrapper or impl.wrapper for impl in impls):
        raise PluginError("hook wrappers are not supported: every plugin's hooks are called alone")

    return manager


def _specs(module: object, hook: str) -> tuple[BackendSpec, ...]:
    specs: list[BackendSpec] = []
    for call in hook_calls(module, hook):
        result = call({})
        if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
            raise PluginError(f"must return BackendSpecs in a list, not {type(result).__name__}")

        specs.extend(result)

    for spec in specs:
        if not isinstance(spec, BackendSpec):
            raise PluginError(f"must return BackendSpecs, not {type(spec).__name__}")

    return tuple(specs)


def _check_specs(kind: Kind, specs: Sequence[BackendSpec]) -> None:
    names: set[str] = set()
    for spec in specs:
        if spec.api > hookspecs.API_VERSION:
            raise PluginVersionError(
                f"backend {spec.name!r} is written for hook API {spec.api}, this dtorch-core knows API "
                f"{hookspecs.API_VERSION}; pip install --upgrade dtorch-core"
            )

        if spec.api < 1:
            raise PluginVersionError(f"backend {spec.name!r}: hook API {spec.api} never existed; the first is 1")

        for word in sorted(spec.capabilities - CAPABILITIES[kind]):
            raise PluginError(
                f"backend {spec.name!r} declares an unknown {kind} capability {word!r}."
                + did_you_mean(word, CAPABILITIES[kind])
            )

        if spec.name in names:
            raise PluginError(f"offers the {kind} backend {spec.name!r} twice")

        names.add(spec.name)
