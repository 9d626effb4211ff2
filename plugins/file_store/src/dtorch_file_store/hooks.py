"""What this distribution offers. Imports no torch."""

from __future__ import annotations

from dtorch_core import BackendSpec, Member, Support, Topology, hookimpl


def probe(topology: Topology) -> Support:
    """Processes of one host share memory through files that they pass each other."""
    if not topology.same_host:
        return Support.no(f"the ranks are on {len(topology.hosts)} hosts; shared memory reaches the processes of one")

    if topology.same_process:
        return Support.yes(10, "all ranks are threads of one process, which need no file: it works, memory is better")

    return Support.yes(100, f"the ranks are in {len(topology.by_process())} processes of one host: they map one memory")


@hookimpl
def dtorch_register_tensor_stores() -> list[BackendSpec]:
    return [
        BackendSpec(
            "file",
            "dtorch_file_store.store:FileTensorStore",
            probe,
            capabilities=frozenset({"cpu", "cuda", "cross_device", "zero_copy", "multi_process"}),
        )
    ]


@hookimpl
def dtorch_register_promises() -> list[BackendSpec]:
    return [
        BackendSpec(
            "file",
            "dtorch_file_store.promise:FilePromises",
            probe,
            capabilities=frozenset({"cpu", "cuda", "multi_process", "await"}),
        )
    ]


@hookimpl
def dtorch_doctor() -> list[str]:
    from dtorch_file_store import directory  # not to list what is installed

    return directory.report()


@hookimpl
def dtorch_describe_member(member: Member) -> dict[str, str]:
    """Whether this rank's process can map CUDA memory of others."""
    if member.device_type != "cuda":
        return {}

    from dtorch_file_store.reach import facts

    return facts(member.device)
