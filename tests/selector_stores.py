"""Plugins with stores for the selector to choose from, and a site's policy."""

import pytest

from dtorch_core import refresh
from dtorch_core._selection.topology import imagine

THREADS = imagine(4)
PROCESSES = imagine(4, "processes")
HOSTS = imagine(4, "processes", hosts=2)

POLICY = """
    from dtorch_core import hookimpl

    calls = []

    @hookimpl
    def dtorch_rank_backends(kind, topology, verdicts):
        calls.append((kind, topology, verdicts))
        {body}
"""


@pytest.fixture
def stores(site):
    """Four stores: ``best`` and ``fair`` fit everything, ``local`` fits one process, ``never`` fits nothing."""
    site.backend("best-dist", "best", "Support.yes(2000, 'best of all')", plugin="best")
    site.backend("fair-dist", "fair", "Support.yes(1500, 'fair enough')", plugin="fair")
    local = "Support.yes(500, 'one process') if topology.same_process else Support.no('several processes')"
    site.backend("local-dist", "local", local, plugin="local")
    site.backend("never-dist", "never", "Support.no('it is not written yet')", plugin="never")
    refresh()
    return site


@pytest.fixture
def policy(stores):
    """Install a site policy whose hook's body is given; gives its module."""

    def add(body, distribution="policy-dist"):
        module = stores.add(distribution, POLICY.replace("{body}", body), plugin=distribution)
        refresh()
        return stores.loaded(module)

    return add
