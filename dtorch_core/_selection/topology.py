"""Where the ranks are: their hosts, processes, threads and devices. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

from dtorch_core._text import MOST_NAMED, count, rank_list

T = TypeVar("T", str, int)


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's place."""

    rank: int
    host: str
    """The boot id plus what separates containers; not the host name."""
    pid: int
    thread: int
    device: str
    """As torch writes it: ``"cpu"``, ``"cuda:0"``. Ordinals are the member's own (``CUDA_VISIBLE_DEVICES``)."""
    device_uuid: str = ""
    """Tells GPUs apart across processes; empty for the CPU."""
    facts: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What the ``dtorch_describe_member`` hooks added on that rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Member.from_dict, (self.to_dict(),)  # a read-only view of a dict can't be pickled

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.device.partition(":")[0]

    @property
    def process(self) -> tuple[str, int]:
        """Equal for members of one process."""
        return self.host, self.pid

    @property
    def device_key(self) -> tuple[str, str]:
        """Equal for members that share one device."""
        return ("uuid", self.device_uuid) if self.device_uuid else (self.host, self.device)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "facts": dict(self.facts)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Member:
        """The inverse of :meth:`to_dict`."""
        return cls(**fields)


class Topology(tuple[Member, ...]):
    """The members of one store, group or promise, in rank order."""

    __slots__ = ()

    def __new__(cls, members: Iterable[Member]) -> Topology:
        ordered = sorted(members, key=lambda member: member.rank)
        if not ordered:
            raise ValueError("a topology has at least one member")

        if [member.rank for member in ordered] != list(range(len(ordered))):
            raise ValueError(f"ranks must be 0 to {len(ordered) - 1}, each once, not {[m.rank for m in ordered]}")

        return super().__new__(cls, ordered)

    @property
    def same_process(self) -> bool:
        """All ranks are threads of one process."""
        return len({member.process for member in self}) == 1

    @property
    def same_host(self) -> bool:
        """All ranks are on one host (and in one container)."""
        return len(self.hosts) == 1

    @property
    def same_device(self) -> bool:
        """All ranks use one device."""
        return len({member.device_key for member in self}) == 1

    @property
    def distinct_devices(self) -> bool:
        """No two ranks share a device."""
        return len({member.device_key for member in self}) == len(self)

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"`` where all ranks agree, else ``"mixed"``."""
        types = {member.device_type for member in self}
        return types.pop() if len(types) == 1 else "mixed"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, each once, in rank order."""
        return tuple(dict.fromkeys(member.host for member in self))

    def by_process(self) -> dict[tuple[str, int], tuple[Member, ...]]:
        """Members by ``(host, pid)``, in rank order."""
        return _grouped(self, lambda member: member.process)

    def by_device(self) -> dict[tuple[str, str], tuple[Member, ...]]:
        """Members by device, in rank order."""
        return _grouped(self, lambda member: member.device_key)

    def summary(self) -> str:
        """One line: how many ranks, how they are spread, on what."""
        processes, devices = len(self.by_process()), self.by_device()
        if len(self) == 1:
            spread = "in this process"
        elif processes == 1:
            spread = "threads of one process"
        elif processes == len(self):
            spread = "processes of one host" if self.same_host else f"processes on {len(self.hosts)} hosts"
        else:
            spread = f"threads of {processes} processes on {count(len(self.hosts), 'host')}"

        if self.same_device:
            place = f"sharing {self[0].device}" if len(self) > 1 else f"on {self[0].device}"
        elif self.distinct_devices:
            place = "each its own device"
        else:
            some = [
                f"{members[0].device} = {rank_list(member.rank for member in members)}"
                for members in islice(devices.values(), MOST_NAMED)
            ]
            left = len(devices) - len(some)
            place = f"on {len(devices)} devices: {'; '.join(some)}" + (f"; and {left} more" if left else "")

        return f"{count(len(self), 'rank')}, {spread}, {place}"

    def to_dict(self) -> dict[str, Any]:
        """What the selector sees, as JSON values."""
        return {
            "summary": self.summary(),
            "same_process": self.same_process,
            "same_host": self.same_host,
            "same_device": self.same_device,
            "distinct_devices": self.distinct_devices,
            "device_type": self.device_type,
            "members": [member.to_dict() for member in self],
        }

    def __repr__(self) -> str:
        return f"Topology({self.summary()})"


def _grouped(
    members: Iterable[Member], key: Callable[[Member], tuple[str, T]]
) -> dict[tuple[str, T], tuple[Member, ...]]:
    groups: dict[tuple[str, T], list[Member]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)

    return {name: tuple(group) for name, group in groups.items()}


def imagine(
    ranks: int, ranks_as: str = "threads", devices: Sequence[str] = ("cpu",), hosts: int = 1, per_process: int = 1
) -> Topology:
    """A topology that need not exist here: ``ranks`` dealt over ``hosts``, each with the device of its turn.

    :param devices: one for all ranks, or one for each.
    :param per_process: ranks in each process, where ``ranks_as`` is ``"processes"``.
    :raises ValueError: if the numbers don't fit each other.
    """
    if per_process < 1:
        raise ValueError(f"a process has at least one rank, not {per_process}")

    if ranks < 1 or hosts < 1 or hosts > ranks:
        raise ValueError(f"need at least one rank for each host: {ranks} ranks, {hosts} hosts")

    if len(devices) not in (1, ranks):
        raise ValueError(f"give one device for all ranks, or {ranks} of them, not {len(devices)}: {', '.join(devices)}")

    if ranks_as not in ("threads", "processes"):
        raise ValueError(f"ranks are 'threads' or 'processes', not {ranks_as!r}")

    def member(rank: int) -> Member:
        host = rank * hosts // ranks
        device = devices[rank % len(devices)]
        uuid = f"host {host} {device}" if device.startswith("cuda") else ""
        pid = host + 1 if ranks_as == "threads" else ranks + rank // per_process
        return Member(rank, f"host {host}", pid, rank, device, uuid)

    return Topology(member(rank) for rank in range(ranks))
