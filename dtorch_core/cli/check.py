"""Run the conformance kit against an installed backend: what it declares, and whether it holds."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from dtorch_core._selection.reasons import KINDS, BackendSpec, Kind
from dtorch_core._selection.registry import Registry, registry
from dtorch_core._selection.selector import explain
from dtorch_core._selection.topology import imagine
from dtorch_core._text import columns, count, did_you_mean
from dtorch_core.errors import BackendConflictError, PluginError

if TYPE_CHECKING:
    from dtorch_core.testing._run import Outcome

CONTRACT = "contract"
"""What every backend of its kind owes, whatever it declares."""


@dataclass(frozen=True)
class Result:
    """What one word, or the contract, came to."""

    word: str
    outcomes: Sequence[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state == "failed"]

    @property
    def state(self) -> str:
        if self.failed:
            return "failed"

        return "held" if any(outcome.state == "passed" for outcome in self.outcomes) else "not tested"

    @property
    def counts(self) -> dict[str, int]:
        states = [outcome.state for outcome in self.outcomes]
        return {state: states.count(state) for state in ("passed", "failed", "skipped")}

    @property
    def why(self) -> str:
        """Why it was not tested."""
        reasons = dict.fromkeys(outcome.why for outcome in self.outcomes if outcome.state == "skipped")
        return "; ".join(reasons) or "the kit has no test of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The backend."""
    parser.add_argument("name", metavar="NAME", help="of the backend")
    parser.add_argument("--kind", choices=KINDS, help="every kind under which there is a NAME, where not given")
    parser.add_argument(
        "-k", dest="expression", metavar="EXPRESSION", default="", help="only the tests that pytest's -k picks by it"
    )
    parser.add_argument("--verbose", action="store_true", help="show the tests as they run, and each failure")


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print what was held; 1 if a test failed, 2 if no capability is declared or there is no such backend."""
    kinds: Sequence[Kind] = KINDS if options.kind is None else (options.kind,)
    specs = _specs(registry(), options.name, kinds)
    if not any(spec.capabilities for spec in specs.values()):
        raise argparse.ArgumentTypeError(
            f"the {' and '.join(specs)} backend {options.name!r} declares no capability, so there is nothing to hold "
            f"it to: name in its BackendSpec what it can do"
        )

    held_to = {kind: spec for kind, spec in specs.items() if spec.capabilities}
    results = {kind: _results(kind, spec, options.expression, options.verbose) for kind, spec in held_to.items()}
    if options.expression:
        results = {kind: [one for one in found if one.outcomes] for kind, found in results.items()}
        results = {kind: found for kind, found in results.items() if found}
        if not results:
            raise argparse.ArgumentTypeError(
                f"no test of the kit matches -k {options.expression!r}; dtorch check {options.name} --verbose, without "
                f"it, shows their names"
            )

    if options.json:
        facts = {kind: _to_dict(found) for kind, found in results.items()}
        print(json.dumps({"backend": options.name, **facts}, indent=2), file=out)
    else:
        for kind, found in results.items():
            print("\n".join(_text(f"{kind} backend {options.name!r}", found)), file=out)

    return 1 if any(result.failed for found in results.values() for result in found) else 0


def _specs(known: Registry, name: str, kinds: Sequence[Kind]) -> dict[Kind, BackendSpec]:
    specs: dict[Kind, BackendSpec] = {}
    for kind in kinds:
        offers = known.offers(kind).get(name, ())
        if len(offers) > 1:
            labels = " and ".join(offer.plugin.label for offer in offers)
            raise BackendConflictError(f"the {kind} backend {name!r} is offered by {labels}: uninstall all but one")

        if offers:
            specs[kind] = offers[0].spec

    if not specs:
        for plugin in known.broken():
            if any(name in plugin.names(kind) for kind in kinds):
                raise PluginError(f"the plugin of {name!r} is broken: {plugin.why}") from plugin.error

        names = sorted({name for kind in kinds for name in known.offers(kind)})
        what = f"{kinds[0]} backend" if len(kinds) == 1 else "backend"
        absent = [explain(kind, imagine(1)).verdict(name) for kind in kinds]
        whys = dict.fromkeys(verdict.why for verdict in absent if verdict is not None)
        if whys:  # one of ours, a reserved name, or one of a disabled plugin
            raise argparse.ArgumentTypeError(f"there is no {what} {name!r}: {'; '.join(whys)}")

        raise argparse.ArgumentTypeError(
            f"there is no {what} {name!r}.{did_you_mean(name, names)} Installed: {', '.join(names) or 'none'}"
        )

    return specs


def _results(kind: Kind, spec: BackendSpec, expression: str, verbose: bool) -> list[Result]:
    try:
        from dtorch_core.testing._run import run_kit
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "torch"):
            raise

        extra = {"pytest": '"dtorch-core[testing]"', "torch": "torch"}[error.name]
        raise PluginError(f"the conformance kit needs {error.name}: pip install {extra}") from error

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        # What comes in the end is for the standard output; until then one sees that it goes on.
        print(f"the kit of {kind} backends, against {spec.name!r}:", file=sys.stderr, flush=True)
        outcomes = run_kit(kind, spec.name, expression=expression, quiet=not verbose, progress=sys.stderr)

    words = {word: [o for o in outcomes if word in _words(o)] for word in sorted(spec.capabilities)}
    others = [o for o in outcomes if o.state != "skipped" and not _words(o) & spec.capabilities]
    return [Result(CONTRACT, others), *(Result(word, tests) for word, tests in words.items())]


def _words(outcome: Outcome) -> set[str]:
    """The capabilities that a test is about; one that runs on each device is about that device, too."""
    parameters = outcome.test.partition("[")[2].rstrip("]").replace("-", ":").split(":")
    return set(outcome.capabilities) | ({"cpu", "cuda"} & set(parameters))


def _text(title: str, results: Sequence[Result]) -> list[str]:
    lines = [title]
    rows = [(result.word, result.state, _summary(result)) for result in results]
    lines += columns(rows, indent="  ")
    failed = {outcome.test: outcome.why for result in results for outcome in result.failed}
    lines += [f"  FAILED {test}: {why}" for test, why in failed.items()]
    return lines


def _summary(result: Result) -> str:
    if result.state == "not tested":
        return result.why

    return ", ".join(f"{number} {state}" for state, number in result.counts.items() if number) + (
        f" of {count(len(result.outcomes), 'test')}" if result.failed else ""
    )


def _to_dict(results: Sequence[Result]) -> dict[str, Any]:
    return {
        result.word: {
            "state": result.state,
            **result.counts,
            "failures": {outcome.test: outcome.why for outcome in result.failed},
        }
        for result in results
    }
