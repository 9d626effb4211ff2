"""A picture of the collectives: bandwidth over size, one line for each subject."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dtorch_core._text import count
from dtorch_core.bench.cells import Cell
from dtorch_core.bench.collectives import NO_BYTES
from dtorch_core.bench.sizes import GIB, size
from dtorch_core.bench.timing import Series

_WIDTH, _HEIGHT = 4.2, 3.4
"""Inches of one diagram."""


def plot(results: Mapping[Cell, Series], path: Path) -> None:
    """Write a PNG: a diagram for each operation, a row for each world size. Bytes are those of a rank's input.

    :param results: at least one, and all of tensors: a barrier has no bandwidth.
    """
    from matplotlib.figure import Figure

    worlds = list(dict.fromkeys(cell.ranks for cell in results))
    operations = list(dict.fromkeys(cell.operation for cell in results))
    figure = Figure(figsize=(_WIDTH * len(operations), _HEIGHT * len(worlds)), layout="constrained")
    axes = figure.subplots(len(worlds), len(operations), squeeze=False)
    for row, ranks in enumerate(worlds):
        for column, operation in enumerate(operations):
            one = axes[row][column]
            cells = [cell for cell in results if (cell.ranks, cell.operation) == (ranks, operation)]
            cells.sort(key=lambda cell: cell.nbytes)
            for name in dict.fromkeys(name for cell in cells for name in results[cell].rounds if name not in NO_BYTES):
                measured = [cell for cell in cells if name in results[cell]]
                one.plot(
                    [cell.nbytes for cell in measured],
                    [cell.nbytes / results[cell].seconds(name) / GIB for cell in measured],
                    marker="o",
                    label=name,
                )

            one.set_xscale("log", base=2)
            one.set_yscale("log")
            sizes = [cell.nbytes for cell in cells]
            one.set_xticks(sizes, [size(nbytes) for nbytes in sizes], rotation=45, fontsize="small")
            one.set_title(f"{operation}, {count(ranks, 'rank')}")
            one.set_ylabel("GiB/s of a rank's input")
            one.grid(visible=True, alpha=0.3)
            one.legend(fontsize="x-small")

    figure.savefig(path, format="png")
