"""Loads each plugin alone, so that a broken one is listed with its root cause and stops nobody else.

pluggy's own entry-point loader is not used: it imports everything in one go and the first error ends it.
pluggy still checks each plugin: in a manager of its own, where half a registration can do no harm.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import pluggy

from dtorch_core import hookspecs
from dtorch_core._selection import catalogue
from dtorch_core._selection.reasons import CAPABILITIES, BackendSpec, Kind
from dtorch_core._text import canonical, describe_error, did_you_mean, one_line, root_cause
from dtorch_core.errors import PluginError, PluginVersionError

REGISTRATION_HOOKS: dict[Kind, str] = {
    "store": "dtorch_register_tensor_stores",
    "group": "dtorch_register_thread_groups",
    "promise": "dtorch_register_promises",
}

DISABLE, LOAD, STRICT = "DTORCH_DISABLE_PLUGINS", "DTORCH_LOAD_PLUGINS", "DTORCH_STRICT_PLUGINS"

R = TypeVar("R")

Call = Callable[[Mapping[str, Any]], Any]
"""One implementation of a hook; takes the hook's arguments by name."""


class Source(Protocol):
    """An entry point, or what a caller registers by hand."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> str: ...

    @property
    def distribution(self) -> str: ...

    @property
    def version(self) -> str: ...

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
    calls: Mapping[str, tuple[Call, ...]] = field(default_factory=dict, compare=False)
    """What it implements, by hook."""
    specs: Mapping[Kind, tuple[BackendSpec, ...]] = field(default_factory=dict)
    """What it offers; of a broken plugin, as far as that could be read."""
    imports_torch: bool = False
    """Loading it imported torch, which makes ``dtorch plugins`` slow, or fail where there is no torch."""

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The backends of one kind that this plugin stands for; where they could not be read, the catalogue's names
        for its distribution, else its own."""
        if any(self.specs.values()):
            return tuple(spec.name for spec in self.specs.get(kind, ()))

        known = catalogue.names_of(self.distribution, kind)
        return (self.name,) if known is None else known

    @property
    def label(self) -> str:
        """Its distribution and version, as messages name it."""
        return f"{self.distribution} {self.version}".strip()

    def to_dict(self) -> dict[str, Any]:
        """What a person wants to know of it, as JSON values."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.value,
            "state": self.state,
            "why": self.why,
            "imports_torch": self.imports_torch,
            "hooks": list(self.calls),
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


def load(sources: Iterable[Source]) -> tuple[Plugin, ...]:
    """Load every plugin that the environment allows. Raises nothing for a broken one."""
    disabled, allowed = _names(DISABLE) or frozenset(), _names(LOAD)
    plugins = []
    for source in sources:
        names = {canonical(source.name), canonical(source.distribution)}
        if names & disabled:
            plugins.append(_plugin(source, "disabled", f"disabled by {DISABLE}"))
        elif allowed is not None and not names & allowed:
            plugins.append(_plugin(source, "disabled", f"not in {LOAD}"))
        else:
            plugins.append(_load_one(source))

    return tuple(plugins)


def is_strict() -> bool:
    """Whether a broken plugin is an error (``DTORCH_STRICT_PLUGINS=1``)."""
    return os.environ.get(STRICT, "").strip() not in ("", "0")


def strict_error(plugin: Plugin) -> PluginError:
    """The error of a broken plugin, for callers that must not go on without it."""
    kind = PluginVersionError if isinstance(plugin.error, PluginVersionError) else PluginError
    return kind(
        f"plugin {plugin.name!r} of {plugin.label} is broken: {plugin.why}\n"
        f"Repair or uninstall {plugin.distribution}, set {DISABLE}={plugin.name}, or unset {STRICT}."
    )


def unknown_names(sources: Iterable[Source]) -> list[str]:
    """A sentence for each name in the environment's lists that no plugin has."""
    known = {canonical(name) for source in sources for name in (source.name, source.distribution)}
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

    return frozenset(canonical(name.strip()) for name in value.split(",") if name.strip())


def _plugin(source: Source, state: Literal["ok", "broken", "disabled"], why: str = "", **more: Any) -> Plugin:  # noqa: ANN401
    return Plugin(source.name, source.distribution, source.version, source.value, state, why, **more)


def _load_one(source: Source) -> Plugin:
    had_torch = "torch" in sys.modules
    plugin = _loaded(source)
    return replace(plugin, imports_torch=not had_torch and "torch" in sys.modules)


def _loaded(source: Source) -> Plugin:
    module, error = guarded(source.load)
    if error is not None:
        missing = isinstance(root_cause(error), ModuleNotFoundError)
        why = describe_error(error) + ("; `pip check` names what is not installed" if missing else "")
        return _plugin(source, "broken", why, error=error)

    calls, error = guarded(_hook_calls, module)
    if calls is None or error is not None:
        why = "can't be read" if error is None else one_line(str(error))
        return _plugin(source, "broken", why, error=error)

    specs: dict[Kind, tuple[BackendSpec, ...]] = {}
    for kind, hook in REGISTRATION_HOOKS.items():
        found, error = guarded(_specs, calls.get(hook, ()))
        specs[kind] = found or ()
        if error is None:
            _, error = guarded(_check_specs, kind, specs[kind])

        if error is not None:
            return _plugin(
                source, "broken", f"{hook}: {describe_error(error)}", error=error, calls=calls, specs=specs
            )

    return _plugin(source, "ok", calls=calls, specs=specs)


def _hook_calls(module: object) -> dict[str, tuple[Call, ...]]:
    """``module``'s implementations, all of which are of known hooks and take the right arguments.

    :raises PluginError: if one is not, if there is none, or if one is not marked as such.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module)
    except pluggy.PluginValidationError as error:
        raise PluginError(_wrong_arguments(module) or str(error)) from error

    calls: dict[str, tuple[Call, ...]] = {}
    for caller in manager.get_hookcallers(module) or ():
        impls = caller.get_hookimpls()
        if not caller.has_spec():
            if all(impl.optionalhook for impl in impls):
                continue  # for a dtorch-core that knows more hooks than this one

            known = [name for name in dir(hookspecs) if name.startswith(f"{hookspecs.PROJECT}_")]
            raise PluginError(f"implements an unknown hook, {caller.name}.{did_you_mean(caller.name, known)}")

        if any(impl.hookwrapper or impl.wrapper for impl in impls):
            raise PluginError(f"{caller.name} is a hook wrapper, which has nothing to wrap: every hook is called alone")

        calls[caller.name] = tuple(_by_name(impl) for impl in reversed(impls))

    unmarked = [name for name in dir(module) if name not in calls and _is_unmarked(module, name)]
    if unmarked:
        raise PluginError(f"{', '.join(unmarked)} lacks the @hookimpl decorator")

    if not calls:
        raise PluginError("implements no hook; mark its functions with @hookimpl")

    return calls


def _wrong_arguments(module: object) -> str:
    """The first hook that takes what it is not given, and where that is."""
    for name in dir(module):
        function, spec = getattr(module, name), getattr(hookspecs, name, None)
        if inspect.isfunction(function) and inspect.isfunction(spec):
            given, code = list(inspect.signature(spec).parameters), function.__code__
            wrong = [parameter for parameter in inspect.signature(function).parameters if parameter not in given]
            if wrong:
                takes = f"takes {', '.join(wrong)}, which can not be found in the hook's specification"
                what = f"it is given {', '.join(given)}" if given else "it is given no arguments"
                return f"{name} {takes}: {what} ({code.co_filename}:{code.co_firstlineno})"

    return ""


def _is_unmarked(module: object, name: str) -> bool:
    if not name.startswith(f"{hookspecs.PROJECT}_") or not hasattr(hookspecs, name):
        return False

    function = getattr(module, name)
    return callable(function) and not hasattr(function, f"{hookspecs.PROJECT}_spec")


def _by_name(impl: pluggy.HookImpl) -> Call:
    return lambda arguments: impl.function(*(arguments[name] for name in impl.argnames))


def _specs(calls: Sequence[Call]) -> tuple[BackendSpec, ...]:
    specs: list[BackendSpec] = []
    for call in calls:
        result = call({})
        if isinstance(result, Coroutine):
            result.close()  # or Python warns, some day, that nobody has awaited it

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

        for word in sorted(spec.store_needs - CAPABILITIES["store"]):
            raise PluginError(
                f"backend {spec.name!r} needs an unknown capability of its store, {word!r}."
                + did_you_mean(word, CAPABILITIES["store"])
            )

        if spec.name in names:
            raise PluginError(f"offers the {kind} backend {spec.name!r} twice")

        names.add(spec.name)
