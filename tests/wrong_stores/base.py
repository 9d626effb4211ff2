"""What marks a wrong store."""

from dtorch_core import Support

ALL = frozenset({"cpu", "cuda", "cross_device", "zero_copy"})

PATIENCE = 1.0
"""Seconds for tests that are to fail; the right store gets all the time it may need."""

WRONG = []

HANG = 4.0
"""Seconds: longer than a hanging test may take, short enough that its thread is soon gone."""


def within_one_process(topology):
    if topology.same_process:
        return Support.yes(1, "threads of one process")

    return Support.no("several processes")


def wrong(test, *, capabilities=ALL, probe=within_one_process, thorough=False):
    """Mark a wrong store with the kit's test that has to catch it.

    :param thorough: of those that are run only where more than the contract is asked.
    """

    def mark(store):
        store.caught_by, store.capabilities, store.probe = test, frozenset(capabilities), staticmethod(probe)
        store.thorough = thorough
        WRONG.append(store)
        return store

    return mark
