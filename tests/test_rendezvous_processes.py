"""Ranks that are processes meet, and the death of the one that serves ends the waits of the others."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dtorch_core import PeerLostError, open_store

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, Ranks, free_port, raised

fake = opening_ranks.fake


class TestProcesses:
    SCRIPT = """
        import sys
        from dtorch_core import open_store

        rank, size, url = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        store = open_store("x", rank=rank, world_size=size, rendezvous=url, timeout=60)
        pids = [member.pid for member in store.topology]
        assert len(set(pids)) == size and store.topology.same_host and not store.topology.same_process
        print(store.backend, flush=True)
        store.close()
    """

    def start(self, site, rank, size, url):
        command = [sys.executable, "-c", textwrap.dedent(self.SCRIPT), str(rank), str(size), url]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=site.environment, stdout=pipe, stderr=pipe, text=True)

    @pytest.mark.parametrize("scheme", ["tcp", "file"])
    def test_meet(self, fake, site, tmp_path, scheme):
        url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
        processes = [self.start(site, rank, 2, url) for rank in range(2)]
        try:
            for process in processes:
                out, err = process.communicate(timeout=120)
                assert (out.strip(), process.returncode) == ("fake", 0), err
        finally:
            for process in processes:
                process.kill()
                process.wait(10)

    def test_death_of_the_server_ends_the_waits(self, fake, site):
        url = f"tcp://127.0.0.1:{free_port()}"
        server = self.start(site, 0, 3, url)
        try:
            ranks = Ranks([lambda: open_store("x", rank=1, world_size=3, timeout=LONG, rendezvous=url)])
            port, limit = int(url.rpartition(":")[2]), timedelta(seconds=LONG)
            watch = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
            watch.wait(["dtorch/store/x/0/members/0", "dtorch/store/x/0/members/1"], limit)
        finally:
            server.kill()
            server.wait(10)

        (text,) = raised(ranks.join(), PeerLostError)
        assert "the rendezvous is gone" in text
        server.communicate()
