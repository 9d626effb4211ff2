"""What this distribution offers. Imports no torch."""

from __future__ import annotations

from dtorch_core import BackendSpec, Support, Topology, hookimpl


def probe(topology: Topology) -> Support:
    """Threads of one process share memory; on any devices, since a borrowed tensor stays where it is."""
    if topology.same_process:
        return Support.yes(100, "all ranks are threads of one process: tensors are shared, not copied")

    return Support.no(
        f"the ranks are in {len(topology.by_process())} processes; memory reaches the threads of one process only"
    )


@hookimpl
def dtorch_register_tensor_stores() -> list[BackendSpec]:
    return [
        BackendSpec(
            "memory",
            "dtorch_memory_store.store:MemoryTensorStore",
            probe,
            capabilities=frozenset({"cpu", "cuda", "cross_device", "zero_copy"}),
        )
    ]


@hookimpl
def dtorch_register_promises() -> list[BackendSpec]:
    return [
        BackendSpec(
            "memory",
            "dtorch_memory_store.promise:MemoryPromises",
            probe,
            capabilities=frozenset({"cpu", "cuda", "await"}),
        )
    ]


@hookimpl
def dtorch_doctor() -> list[str]:
    from dtorch_memory_store import looking  # not to list what is installed

    return [looking.report()]
