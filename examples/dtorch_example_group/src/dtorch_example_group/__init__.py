"""What this distribution offers: the module that its entry point names. Imports no torch."""

from dtorch_core import BackendSpec, Support, Topology, hookimpl

CAPABILITIES = frozenset({"cpu", "uneven", "rank_order", "bitwise_ops", "split"})


def probe(topology: Topology) -> Support:
    if not topology.same_process:
        return Support.no("the ranks are in different processes; example copies between the threads of one")

    if topology.device_type != "cpu":
        return Support.no(f"the ranks use {topology.device_type} devices; example takes CPU tensors only")

    return Support.yes(1, "all ranks are threads of one process, on the CPU")


@hookimpl
def dtorch_register_thread_groups() -> list[BackendSpec]:
    return [BackendSpec("example", "dtorch_example_group.group:ExampleGroup", probe, capabilities=CAPABILITIES)]
