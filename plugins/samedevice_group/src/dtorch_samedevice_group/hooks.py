"""What this distribution offers. Imports no torch."""

from __future__ import annotations

from dtorch_core import BackendSpec, Support, Topology, hookimpl


def probe(topology: Topology) -> Support:
    """Ranks that share a device reach each other's memory, as threads or through a store between processes."""
    if not topology.same_host:
        return Support.no(f"the ranks are on {len(topology.hosts)} hosts, so they can't share a device")

    if topology.same_device:
        return Support.yes(100, f"all ranks share {topology[0].device}: a collective is reads and writes on a store")

    devices = [members[0].device for members in topology.by_device().values()]
    return Support.no(f"the ranks are on {len(devices)} devices ({', '.join(devices)}), not on one")


@hookimpl
def dtorch_register_thread_groups() -> list[BackendSpec]:
    return [
        BackendSpec(
            "samedevice",
            "dtorch_samedevice_group.group:open_process_group",
            probe,
            capabilities=frozenset(
                "cpu cuda uneven bitwise_ops p2p any_source tags self_send split mismatch rank_order async".split()
            ),
            store_needs=frozenset({"zero_copy"}),  # results are written in place, into what other ranks publish
        )
    ]


@hookimpl
def dtorch_doctor() -> list[str]:
    from dtorch_samedevice_group import sharing  # not to list what is installed

    return sharing.report()
