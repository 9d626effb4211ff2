"""Do the ranks call the same? Each rank's note says it in two lines: what all have to call, and how it calls that."""

from __future__ import annotations

from collections.abc import Sequence

from dtorch_core._text import rank_list
from dtorch_core.errors import CollectiveMismatchError


def compare(label: str, notes: Sequence[str]) -> None:
    """Compare the first lines of all ranks' notes.

    :param label: begins the message.
    :raises CollectiveMismatchError: if they differ; the odd ranks are named, with a table of who called what.
    """
    fingerprints: dict[str, list[int]] = {}
    callers: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        fingerprint, *more = note.split("\n", 2)
        fingerprints.setdefault(fingerprint, []).append(rank)
        callers.setdefault(more[0] if more else fingerprint, []).append(rank)

    if len(fingerprints) == 1:
        return

    ranked = sorted(fingerprints.values(), key=len, reverse=True)
    if len(ranked[0]) > len(ranked[1]):
        odd = rank_list(rank for ranks in ranked[1:] for rank in ranks)
        head = f"{odd} called something else than {rank_list(ranked[0])}"
    else:
        head = f"{rank_list(range(len(notes)))} called different things"

    table = "\n".join(f"  {rank_list(ranks)}: {call}" for call, ranks in callers.items())
    raise CollectiveMismatchError(f"{label}: {head}\n{table}")
