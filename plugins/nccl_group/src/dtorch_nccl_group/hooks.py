"""What this distribution offers. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from dtorch_core import BackendSpec, Member, Support, Topology, hookimpl
from dtorch_core._text import rank_list

VERSION = "nccl.version"
"""The fact that each rank with a GPU tells: its NCCL's version, or "" where its torch has none."""


def probe(topology: Topology) -> Support:
    """Ranks that each have a GPU of their own, on one host or several."""
    cpu = [member.rank for member in topology if member.device_type != "cuda"]
    if cpu:
        return Support.no(f"{rank_list(cpu)} on the CPU, and NCCL takes GPUs only: samedevice is for one device")

    for members in topology.by_device().values():
        if len(members) > 1:
            first = members[0]
            shared = f"{first.device} ({first.device_uuid})" if first.device_uuid else first.device
            ranks = " and ".join(f"rank {member.rank}" for member in members)
            return Support.no(f"{ranks} share {shared}: NCCL refuses that; samedevice is for it")

    lacking = [member.rank for member in topology if member.facts.get(VERSION) == ""]
    if lacking:
        return Support.no(f"the torch of {rank_list(lacking)} is built without NCCL")

    versions: dict[str, list[int]] = {}
    for member in topology:
        versions.setdefault(member.facts.get(VERSION, ""), []).append(member.rank)

    if len(versions) > 1:
        table = ", ".join(f"{version or 'unknown'} ({rank_list(ranks)})" for version, ranks in versions.items())
        return Support.no(f"the ranks have different versions of NCCL: {table}; install one for all")

    return Support.yes(90, "every rank has a GPU of its own: collectives go over NCCL")


@hookimpl
def dtorch_describe_member(member: Member) -> Mapping[str, str]:
    """Which NCCL the rank's torch has. A rank on the CPU needs none, so torch is not imported for it."""
    if member.device_type != "cuda":
        return {}

    from dtorch_nccl_group.torch_nccl import version

    return {VERSION: version()}


@hookimpl
def dtorch_register_thread_groups() -> list[BackendSpec]:
    return [
        BackendSpec(
            "nccl",
            "dtorch_nccl_group.group:open_process_group",
            probe,
            capabilities=frozenset("cuda uneven p2p self_send split async".split()),
        )
    ]
