"""Chooses a backend for a topology: authority, then site policy, then score, then name; and keeps every reason."""

from __future__ import annotations

from collections.abc import Sequence

from dtorch_core._selection import catalogue
from dtorch_core._selection.authority import Ask, asked_for
from dtorch_core._selection.discovery import DISABLE, LOAD, guarded
from dtorch_core._selection.reasons import BackendSpec, Kind, Selection, State, Support, Verdict
from dtorch_core._selection.registry import Offer, Registry, registry
from dtorch_core._selection.topology import Topology
from dtorch_core._text import describe_error, did_you_mean
from dtorch_core.errors import BackendConflictError, DtorchError, NoBackendError, PluginVersionError


def explain(kind: Kind, topology: Topology, *, backend: str | None = None) -> Selection:
    """What would be chosen and why. Raises nothing for a refusal: ``chosen`` is then None.

    :raises ValueError: if ``kind`` is not one of store, group and promise.
    """
    return _considered(registry(), kind, topology, asked_for(kind, backend))


def select(kind: Kind, topology: Topology, *, backend: str | None = None) -> Selection:
    """Choose, or raise the reason why nothing fits. Observers hear of the choice.

    :raises NoBackendError: if no backend fits, or the one asked for does not, or is not installed.
    :raises BackendConflictError: if two distributions offer the name asked for.
    :raises PluginVersionError: if the plugin of the name asked for needs another dtorch-core.
    """
    selection, error = choose(kind, topology, backend=backend)
    if error is not None:
        raise error

    announce(selection)
    return selection


def choose(
    kind: Kind, topology: Topology, *, backend: str | None = None
) -> tuple[Selection, DtorchError | None]:
    """:func:`explain`, and the error to raise where nothing was chosen. Nobody hears of it."""
    ask = asked_for(kind, backend)
    selection = _considered(registry(), kind, topology, ask)
    return selection, refusal(selection, ask) if selection.chosen is None else None


def announce(selection: Selection) -> None:
    """Tell the observers of a choice."""
    for _ in registry().call("dtorch_backend_selected", {"selection": selection}, lambda result: result):
        pass


def spec_of(selection: Selection) -> BackendSpec:
    """The chosen backend's spec.

    :raises NoBackendError: if its plugin is gone since.
    """
    offers = registry().offers(selection.kind).get(selection.chosen or "", ())
    if len(offers) != 1:
        raise NoBackendError(f"the {selection.kind} backend {selection.chosen!r} went away since it was chosen")

    return offers[0].spec


def refusal(selection: Selection, ask: Ask | None) -> DtorchError:
    """The error for a selection that chose nothing."""
    if ask is not None:
        return _asked_refusal(selection, ask)

    states = {verdict.state for verdict in selection.verdicts}
    lines = [str(selection)]
    if "broken" in states:
        lines.append("Some plugins are broken; see: dtorch doctor")

    if len(selection.topology.hosts) > 1:
        text = "Several hosts need a network backend, and those names are reserved: none exists yet."
        also = " A group of ranks that each have a GPU of their own needs none: nccl reaches them."
        lines.append(text + also if selection.kind == "group" else text)
    elif states == {"absent"}:
        lines.append(_kept_out(selection) or catalogue.install_hint(selection.kind))

    return NoBackendError("\n".join(lines))


def _kept_out(selection: Selection) -> str:
    """What to do where the environment keeps out what is installed; "" where nothing is."""
    names = ", ".join(verdict.name for verdict in selection.verdicts if verdict.version)
    ways = {DISABLE: "take one out of", LOAD: "add one to"}
    reasons = " ".join(verdict.why for verdict in selection.verdicts if verdict.version)
    outs = " and ".join(f"unset {variable}, or {way} it" for variable, way in ways.items() if variable in reasons)
    return f"Installed {selection.kind} backends are kept out by the environment ({names}): {outs}" if names else ""


def _asked_refusal(selection: Selection, ask: Ask) -> DtorchError:
    kind, verdict = selection.kind, selection.verdict(ask.name)
    asked = f"{kind} backend {ask.name!r} (asked for by {ask.asked_by})"
    known = registry()
    offers = known.offers(kind).get(ask.name, ())
    if len(offers) > 1:
        return BackendConflictError(f"{asked} is offered by {_offered_by(offers)}: uninstall all but one of them")

    if verdict is None:
        installed = sorted(v.name for v in selection.verdicts if v.state in ("yes", "no"))
        return NoBackendError(
            f"there is no {asked}.{did_you_mean(ask.name, (v.name for v in selection.verdicts))} "
            f"Installed: {', '.join(installed) or 'none'}. See them with: dtorch plugins"
        )

    if verdict.state == "no":
        return NoBackendError(f"{asked} does not fit {selection.topology.summary()}: {verdict.why}")

    if verdict.state == "absent":
        return NoBackendError(f"{asked} is absent: {verdict.why}")

    broken = next((plugin for plugin in known.broken() if ask.name in plugin.names(kind)), None)
    cause = broken.error if broken is not None else None
    error = (PluginVersionError if isinstance(cause, PluginVersionError) else NoBackendError)(
        f"{asked} is broken: {verdict.why}"
    )
    error.__cause__ = cause
    return error


def _considered(known: Registry, kind: Kind, topology: Topology, ask: Ask | None) -> Selection:
    verdicts = _verdicts(known, kind, topology)
    if ask is not None:
        chosen = ask.name if any(v.name == ask.name and v.state == "yes" for v in verdicts) else None
        return Selection(kind, topology, chosen, ask.asked_by, verdicts)

    arguments = {"kind": kind, "topology": topology, "verdicts": verdicts}
    for plugin, names in known.call("dtorch_rank_backends", arguments, _checked_policy):
        if names is not None:
            return _by_policy(known, kind, topology, verdicts, names, f"policy of {plugin.distribution}")

    best = next((verdict.name for verdict in verdicts if verdict.state == "yes"), None)
    return Selection(kind, topology, best, "score", verdicts)


def _by_policy(
    known: Registry, kind: Kind, topology: Topology, verdicts: tuple[Verdict, ...], names: Sequence[str], policy: str
) -> Selection:
    states = {verdict.name: verdict.state for verdict in verdicts}
    for name in names:
        if name not in states:
            known.report(f"{policy} names {name!r}, which is no {kind} backend.{did_you_mean(name, states)}")

    chosen = next((name for name in names if states.get(name) == "yes"), None)
    return Selection(kind, topology, chosen, f"{policy}, which allows {', '.join(names) or 'none'}", verdicts)


def _checked_policy(names: object) -> tuple[str, ...] | None:
    if names is None:
        return None

    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"must return a list of backend names or None, not {names!r}")

    return tuple(names)


def _verdicts(known: Registry, kind: Kind, topology: Topology) -> tuple[Verdict, ...]:
    offers = known.offers(kind)
    verdicts = []
    for offered in offers.values():
        if len(offered) > 1:
            why = f"the name is offered by {_offered_by(offered)}; uninstall all but one of them"
            verdicts += [_verdict(offer, "broken", why) for offer in offered]
        else:
            verdicts.append(_probed(offered[0], topology))

    # A plugin that is broken or disabled is listed under the names it stands for.
    unusable: dict[str, State] = {"broken": "broken", "disabled": "absent"}
    verdicts += [
        Verdict(name, plugin.distribution, plugin.version, unusable[plugin.state], 0, plugin.why)
        for plugin in known.plugins
        if plugin.state in unusable
        for name in plugin.names(kind)
        if name not in offers
    ]
    verdicts += catalogue.absent(kind, {verdict.name for verdict in verdicts})
    order = {"yes": 0, "no": 1, "broken": 2, "absent": 3}
    return tuple(sorted(verdicts, key=lambda v: (order[v.state], -v.score, v.name, v.distribution)))


def _probed(offer: Offer, topology: Topology) -> Verdict:
    support, error = guarded(offer.spec.probe, topology)
    if error is not None:
        return _verdict(offer, "broken", f"its probe raised {describe_error(error)}")

    if not isinstance(support, Support):
        why = f"its probe returned {type(support).__name__}, not Support.yes(...) or Support.no(...)"
        return _verdict(offer, "broken", why)

    return _verdict(offer, "yes" if support.ok else "no", support.why, support.score)


def _verdict(offer: Offer, state: State, why: str, score: int = 0) -> Verdict:
    return Verdict(offer.spec.name, offer.plugin.distribution, offer.plugin.version, state, score, why)


def _offered_by(offers: Sequence[Offer]) -> str:
    return " and ".join(offer.plugin.label for offer in offers)
