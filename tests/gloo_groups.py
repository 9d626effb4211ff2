"""Process groups that are not ours, for a ThreadGroup over them: torch's Gloo, by what each declares."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

import dtorch_core
from dtorch_core import BackendSpec, Support, hookimpl
from dtorch_core.testing import run_ranks

LIMIT = 20.0
FEW = frozenset("cpu async p2p tags".split())


def open_gloo(ctx):
    """c10d's own process group, with Gloo for the CPU. Ranks may be threads."""
    store = dist.PrefixStore("gloo", ctx.rendezvous)
    backend = dist.ProcessGroupGloo(store, ctx.rank, ctx.world_size, timedelta(seconds=ctx.timeout))
    group = dist.ProcessGroup(store, ctx.rank, ctx.world_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


def open_something_else(ctx):
    return "not a process group"


class Plugin:
    @hookimpl
    def dtorch_register_thread_groups(self):
        def probe(topology):
            return Support.yes(1, "gloo reaches everything")

        return [
            BackendSpec("gloo", f"{__name__}:open_gloo", probe, capabilities=FEW),
            BackendSpec("bare", f"{__name__}:open_gloo", probe, capabilities=frozenset({"cpu"})),
            BackendSpec("all", f"{__name__}:open_gloo", probe, capabilities=FEW | {"any_source", "split", "uneven"}),
            BackendSpec("uneven", f"{__name__}:open_gloo", probe, capabilities=FEW | {"uneven"}),
            BackendSpec("bitwise", f"{__name__}:open_gloo", probe, capabilities=FEW | {"bitwise_ops"}),
            BackendSpec("text", f"{__name__}:open_something_else", probe),
        ]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="foreign groups")
    with pytest.MonkeyPatch.context() as patch:
        if TorchVersion(torch.__version__) < "2.12":
            patch.setenv("TORCH_FR_BUFFER_SIZE", "0")  # its recorder of Gloo's calls crashes where ranks are threads

        yield

    dtorch_core.unregister("foreign groups")


def on_ranks(body, world_size=2, backend="gloo", timeout=LIMIT):
    def rank(ctx):
        with ctx.open_group("foreign", backend=backend, timeout=timeout) as group:
            return body(group)

    return run_ranks(rank, world_size, 2 * LIMIT)


def part(rank, *shape, dtype=torch.float32):
    """Values that differ by position and rank."""
    return torch.arange(torch.Size(shape).numel()).add(1000 * (rank + 1)).to(dtype).reshape(shape)
