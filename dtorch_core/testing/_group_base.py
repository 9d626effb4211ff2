"""What the parts of the group kit share: opening a group on every rank, values that tell where they belong, oracles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from dtorch_core._copies import plain
from dtorch_core._meeting.member import normal_device
from dtorch_core._selection.topology import Member, Topology
from dtorch_core.extras import companion, lacking
from dtorch_core.group import ThreadGroup
from dtorch_core.launcher import RankContext
from dtorch_core.testing._harness import CUDA, Conformance, installed_spec, run_ranks
from dtorch_core.testing._subclasses import quiet

T = TypeVar("T")

SHORT = 0.1
"""Seconds for a wait that is expected to end at its deadline."""

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
PAIR_AND_MORE = pytest.mark.parametrize("world_size", [2, 3])


class GroupConformance(Conformance):
    """Base of the parts of :class:`ThreadGroupTests`."""

    kind = "group"

    @property
    def home(self) -> str:
        """The device for tests where any will do."""
        return "cpu" if "cpu" in self.declared else normal_device(CUDA)

    def devices(self, device: str, world_size: int) -> str | Sequence[str]:
        """Where the ranks of a test for ``device`` are: on it, or with a GPU each if the backend takes only that."""
        if world_size == 1 or not device.startswith("cuda") or not _takes_a_gpu_each(self.backend):
            return device

        gpus = torch.cuda.device_count()
        if world_size > gpus:
            pytest.skip(f"{world_size} ranks take a GPU each, and there are {gpus}")

        return [f"cuda:{number}" for number in range(world_size)]

    def needs_meeting(self, collective: str) -> None:
        """Skip what takes ranks that meet on the host, where the backend lets them call without that.

        One that does not compare their calls queues what it can, and what is wrong shows where the host next waits.
        """
        known = [c.name for c in COLLECTIVES if not c.exchanges]
        if "mismatch" not in self.declared and collective in known:
            pytest.skip(f"{self.kind} backend {self.backend!r} does not declare 'mismatch': ranks need not meet")

    def has_methods_for(self, word: str, why: str) -> None:
        """Fail where the backend declares ``word``, and its process group lacks the methods that this takes."""

        def body(group: ThreadGroup) -> list[str]:
            return [] if companion(group.process_group) is not None else lacking(group.process_group)

        (missing,) = self.ranks(body, 1)
        assert not missing, (
            f"group backend {self.backend!r} declares {word!r}, and its process group has no {', '.join(missing)} as "
            f"dtorch_core.extras.Extras has them: {why}. Write them, or don't declare it (docs/backend.md, Groups)"
        )

    def ranks(
        self,
        body: Callable[[ThreadGroup], T],
        world_size: int,
        device: str | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Open a group on every rank, call ``body(group)``, close it; the results by rank.

        :param timeout: the group's own, for calls that name none.
        """

        def rank(ctx: RankContext) -> T:
            own = self.patience / 2 if timeout is None else timeout
            group = ctx.open_group("kit", backend=self.backend, timeout=own)
            assert group is not None
            with group:
                return body(group)

        return self.raw_ranks(rank, world_size, device)

    def raw_ranks(self, rank: Callable[[RankContext], T], world_size: int, device: str | None = None) -> list[T]:
        """``rank(ctx)`` on every rank, for tests that open groups themselves."""
        return run_ranks(rank, world_size, self.patience, devices=self.devices(device or self.home, world_size))


@cache
def _takes_a_gpu_each(backend: str) -> bool:
    """It refuses two ranks that share a GPU, and takes them where each has its own."""
    probe = installed_spec("group", backend).probe

    def of(*gpus: int) -> Topology:
        places = [(f"cuda:{gpu}", f"GPU {gpu}") for gpu in gpus]
        return Topology(Member(rank, "host", 1, rank, *place) for rank, place in enumerate(places))

    return probe(of(0, 1)).ok and not probe(of(0, 0)).ok


def coded(
    rank: int, shape: Sequence[int] = (7,), device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Small whole numbers that differ at every position and on every rank: a mix-up shows, and any order is exact."""
    return torch.arange(math.prod(shape), device=device).add(1000 * (rank + 1)).to(dtype).reshape(tuple(shape))


def same(got: object, wanted: object) -> bool:
    """Equal in shape, dtype, device and every bit; lists element by element, None to None."""
    if isinstance(wanted, (list, tuple)):
        return isinstance(got, list) and len(got) == len(wanted) and all(map(same, got, wanted))

    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return got is wanted is None

    if (got.shape, got.dtype, got.device) != (wanted.shape, wanted.dtype, wanted.device):
        return False

    return torch.equal(bits(got), bits(wanted))


def bits(tensor: Tensor) -> Tensor:
    """The bytes of the values: NaN and -0.0 are what they are, and every dtype compares."""
    whole = plain(tensor.detach())
    return whole.reshape(-1).view(torch.uint8) if whole.numel() else torch.empty(0, dtype=torch.uint8)


def all_dtypes() -> list[torch.dtype]:
    """Every dtype that this torch has, also those that it can't copy, but for quantized ones; versions differ."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return [dtype for dtype in sorted(found, key=str) if not str(dtype).startswith("torch.q")]


def of_dtype(rank: int, dtype: torch.dtype, device: str, size: int = 6) -> Tensor:
    """Elements whose bytes count up: right for a dtype that has no arithmetic, too."""
    raw = torch.arange(size * dtype.itemsize).add(37 * rank).to(torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).to(device).view(dtype)


def chunks(x: Tensor, parts: int, dim: int) -> list[Tensor]:
    """torch.chunk, with empty chunks at the end where it gives fewer."""
    size = x.shape[dim]
    full = -(-size // parts)
    return [x.narrow(dim, min(part * full, size), max(0, min(full, size - part * full))) for part in range(parts)]


def summed(xs: Sequence[Tensor]) -> Tensor:
    """In rank order."""
    total = xs[0].clone()
    for x in xs[1:]:
        total = total + x

    return total


Call = Callable[..., Any]
Oracle = Callable[[Sequence[Tensor], int], Any]


@dataclass(frozen=True)
class Collective:
    """One collective with its arguments: how to call it, and what it must give."""

    name: str
    call: Call
    """``call(group, x, **options)``: this rank's result."""
    wanted: Oracle
    """``wanted(xs, rank)``: what ``rank`` gets where ``xs`` are all ranks' inputs."""
    out: bool = True
    """It takes ``out=``."""
    scalar: bool = True
    """It takes 0-dim tensors."""
    uneven: bool = False
    """Chunks differ in size where a dim does not divide."""
    root: int | None = None
    """The rank with a part of its own."""

    @property
    def exchanges(self) -> bool:
        """Its ranks tell each other their sizes first, so they meet."""
        return not self.name.startswith(("all_reduce", "reduce", "broadcast"))

    def __str__(self) -> str:
        return self.name


def _pieces(x: Tensor, world_size: int) -> list[Tensor]:
    """One tensor for each rank, no two alike."""
    if type(x) is Tensor:
        return [x + 100 * rank for rank in range(world_size)]

    return [(quiet(x) + 100 * rank).as_subclass(type(x)) for rank in range(world_size)]


COLLECTIVES = [
    Collective("all_reduce", lambda g, x, **kw: g.all_reduce(x, **kw), lambda xs, rank: summed(xs)),
    Collective(
        "reduce",
        lambda g, x, **kw: g.reduce(x, g.world_size - 1, **kw),
        lambda xs, rank: summed(xs) if rank == len(xs) - 1 else None,
        root=-1,
    ),
    Collective(
        "broadcast",
        lambda g, x, **kw: g.broadcast(x, g.world_size - 1, **kw),
        lambda xs, rank: xs[-1].clone(),
        root=-1,
    ),
    Collective(
        "all_gather",
        lambda g, x, **kw: g.all_gather(x, **kw),
        lambda xs, rank: torch.cat([x.reshape(1) if x.dim() == 0 else x for x in xs]),
    ),
    Collective(
        "all_gather along the last dim",
        lambda g, x, **kw: g.all_gather(x, -1, **kw),
        lambda xs, rank: torch.cat(list(xs), -1),
        scalar=False,
    ),
    Collective(
        "all_gather_list", lambda g, x, **kw: g.all_gather_list(x, **kw), lambda xs, rank: list(xs), out=False
    ),
    Collective(
        "reduce_scatter",
        lambda g, x, **kw: g.reduce_scatter(x, **kw),
        lambda xs, rank: chunks(summed(xs), len(xs), 0)[rank],
        scalar=False,
        uneven=True,
    ),
    Collective(
        "reduce_scatter along the last dim",
        lambda g, x, **kw: g.reduce_scatter(x, -1, **kw),
        lambda xs, rank: chunks(summed(xs), len(xs), -1)[rank],
        scalar=False,
        uneven=True,
    ),
    Collective(
        "all_to_all",
        lambda g, x, **kw: g.all_to_all(x, 0, -1, **kw),
        lambda xs, rank: torch.cat([chunks(x, len(xs), 0)[rank] for x in xs], -1),
        scalar=False,
        uneven=True,
    ),
    Collective(
        "all_to_all the other way",
        lambda g, x, **kw: g.all_to_all(x, -1, 0, **kw),
        lambda xs, rank: torch.cat([chunks(x, len(xs), -1)[rank] for x in xs], 0),
        scalar=False,
        uneven=True,
    ),
    Collective(
        "all_to_all_list",
        lambda g, x, **kw: g.all_to_all_list(_pieces(x, g.world_size), **kw),
        lambda xs, rank: [_pieces(x, len(xs))[rank] for x in xs],
        out=False,
    ),
    Collective(
        "gather",
        lambda g, x, **kw: g.gather(x, g.world_size - 1, **kw),
        lambda xs, rank: list(xs) if rank == len(xs) - 1 else None,
        out=False,
        root=-1,
    ),
    Collective(
        "scatter",
        lambda g, x, **kw: g.scatter(
            _pieces(x, g.world_size) if g.rank == g.world_size - 1 else None, g.world_size - 1, **kw
        ),
        lambda xs, rank: _pieces(xs[-1], len(xs))[rank],
        root=-1,
    ),
]
"""Every collective but the barrier, with a root that is not rank 0."""

EACH = pytest.mark.parametrize("collective", COLLECTIVES, ids=str)
