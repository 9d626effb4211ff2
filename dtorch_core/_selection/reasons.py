"""Reasons as values: what a backend offers, what it answered, what was chosen and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dtorch_core._selection.topology import Topology
from dtorch_core._text import columns, one_line

Kind = Literal["store", "group", "promise"]
"""The three kinds of backend."""

KINDS: tuple[Kind, ...] = get_args(Kind)

CAPABILITIES: dict[Kind, frozenset[str]] = {
    "store": frozenset({"cpu", "cuda", "cross_device", "zero_copy", "multi_process", "multi_host"}),
    "group": frozenset(
        "cpu cuda uneven bitwise_ops p2p any_source tags self_send split mismatch rank_order async".split()
    ),
    "promise": frozenset({"cpu", "cuda", "multi_process", "multi_host", "await"}),
}
"""The words a :class:`BackendSpec` may declare, by kind. The conformance kit holds a backend to those it declares."""


@dataclass(frozen=True, slots=True)
class Support:
    """A probe's answer: yes with a score, or no; never without a reason."""

    ok: bool
    score: int
    why: str

    def __post_init__(self) -> None:
        if not isinstance(self.why, str) or not self.why.strip():
            raise ValueError("Support needs a reason: say why this backend does, or does not, fit")

        if isinstance(self.score, bool) or not isinstance(self.score, int):
            raise TypeError(f"Support.yes(score, why) takes an int score, not {self.score!r}")

    @classmethod
    def yes(cls, score: int, why: str) -> Support:
        """The backend fits. The highest score wins; ties go by name."""
        return cls(True, score, why)

    @classmethod
    def no(cls, why: str) -> Support:
        """The backend does not fit."""
        return cls(False, 0, why)


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a plugin offers under one name. Cheap to make: nothing of the backend is imported for it."""

    name: str
    """Unique within its kind: ``"memory"``, ``"samedevice"``."""
    factory: str
    """``"package.module:callable"``, imported only when this backend is chosen."""
    probe: Callable[[Topology], Support]
    """Says whether the backend fits a topology. Must be fast, import no torch, and depend on its argument alone,
    so that every rank computes the same choice."""
    api: int = 1
    """The version of the hook contract this backend was written for."""
    capabilities: frozenset[str] = frozenset()
    """Words of :data:`CAPABILITIES`. The conformance kit holds the backend to each."""
    store_needs: frozenset[str] = frozenset()
    """Of a group: what a store that it opens over its ranks has to declare. Others are refused, and explained."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"BackendSpec.name must be a non-empty string, not {self.name!r}")

        module, _, attribute = self.factory.partition(":") if isinstance(self.factory, str) else ("", "", "")
        if not module or not attribute:
            raise ValueError(
                f"backend {self.name!r}: factory must read 'package.module:callable', not {self.factory!r}"
            )

        if not callable(self.probe):
            raise ValueError(f"backend {self.name!r}: probe must be callable, not {self.probe!r}")

        if isinstance(self.api, bool) or not isinstance(self.api, int):
            raise ValueError(f"backend {self.name!r}: api must be an int, not {self.api!r}")

        for field in ("capabilities", "store_needs"):
            words = getattr(self, field)
            if isinstance(words, str):
                raise ValueError(f"backend {self.name!r}: {field} must be a set of words, not one string")

            object.__setattr__(self, field, frozenset(words))

    def store_lacks(self, store: BackendSpec) -> str:
        """Why a store can't be what this backend opens over its ranks; empty if it can."""
        lacking = ", ".join(repr(word) for word in sorted(self.store_needs - store.capabilities))
        if not lacking:
            return ""

        return f"{self.name} needs a store that declares {lacking}, and {store.name} does not"


State = Literal["yes", "no", "broken", "absent"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one backend in one selection."""

    name: str
    distribution: str
    version: str
    state: State
    score: int
    why: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {field: getattr(self, field) for field in self.__slots__}


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice and all that led to it. ``str()`` of it is the explanation."""

    kind: Kind
    topology: Topology
    chosen: str | None
    """The backend's name, or None where none fits."""
    asked_by: str
    """What decided: ``"argument"``, ``"use_backend"``, ``"environment DTORCH_..."``, ``"policy of ..."`` or
    ``"score"``."""
    verdicts: tuple[Verdict, ...]
    """Best first; every backend is here, also those that were refused, are broken or are not installed."""

    def verdict(self, name: str) -> Verdict | None:
        """The verdict on ``name``, or None."""
        return next((verdict for verdict in self.verdicts if verdict.name == name), None)

    @property
    def why(self) -> str:
        """The chosen backend's reason, or an empty string where none was chosen."""
        verdict = self.verdict(self.chosen) if self.chosen else None
        return verdict.why if verdict else ""

    def to_dict(self) -> dict[str, Any]:
        """The whole selection as JSON values."""
        return {
            "kind": self.kind,
            "chosen": self.chosen,
            "asked_by": self.asked_by,
            "topology": self.topology.to_dict(),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }

    def __str__(self) -> str:
        head = f"{self.kind} for {self.topology.summary()}: {self.chosen or 'no backend fits'}"
        rows = [
            (
                "->" if verdict.name == self.chosen else "",
                verdict.name,
                verdict.state,
                str(verdict.score) if verdict.state == "yes" else "-",
                f"{verdict.distribution} {verdict.version}".strip() or "-",
                one_line(verdict.why),
            )
            for verdict in self.verdicts
        ]
        return "\n".join([f"{head} (decided by {self.asked_by})", *columns(rows, indent="  ")])
