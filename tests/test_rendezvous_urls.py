"""Where ranks meet, as a URL or torchrun's environment says it."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from dtorch_core import DtorchError, StoreTimeoutError, open_store, spawn
from dtorch_core._meeting import rendezvous as rendezvous

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import opening_ranks
    from opening_ranks import LONG, PROMPT, SHORT, Ranks, free_port, opened, raised

fake = opening_ranks.fake


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("http://127.0.0.1:80", "the scheme must be tcp://host:port, file:///path or env://"),
            ("127.0.0.1:80", "the scheme must be"),
            ("", "the scheme must be"),
            ("tcp://127.0.0.1", "needs a host and a port"),
            ("tcp://127.0.0.1:0", "needs a host and a port"),
            ("tcp://127.0.0.1:port", "needs a host and a port"),
            ("tcp://:29500", "needs a host and a port"),
            ("tcp://127.0.0.1:29500?rank=0", "rank and world_size are arguments"),
            ("file://relative/path", "file:///path"),
            ("file://", "file:///path"),
        ],
    )
    def test_unreadable(self, fake, url, said):
        with pytest.raises(ValueError, match=said):
            open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=url)

    def test_file_that_can_not_be_written(self, fake, tmp_path):
        with pytest.raises(DtorchError, match="rendezvous file:///.* can't be used: .*no_such_folder") as caught:
            open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=f"file://{tmp_path}/no_such_folder/file")

        assert isinstance(caught.value.__cause__, FileNotFoundError)

    def test_nobody_serves(self, fake):
        url = f"tcp://127.0.0.1:{free_port()}"
        ranks = Ranks([lambda: open_store("x", rank=1, world_size=2, timeout=SHORT, rendezvous=url)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "within 0.3 s" in text
        assert "Is rank 0 up" in text
        assert ranks.seconds < SHORT + 1

    @pytest.mark.parametrize("rank", [0, 1])
    def test_host_whose_name_nobody_knows(self, fake, rank, capfd):
        url = "tcp://no-such-host.invalid:29500"
        ranks = Ranks([lambda: open_store("x", rank=rank, world_size=2, timeout=SHORT, rendezvous=url)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "no rendezvous at no-such-host.invalid:29500 within 0.3 s: [Errno " in text
        assert "Is rank 0 up, which serves it, and the address right?" in text
        assert ranks.seconds < SHORT + PROMPT
        assert capfd.readouterr().err == ""

    def test_name_server_that_does_not_answer(self, fake, monkeypatch):
        answers, ask = threading.Event(), socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: answers.wait(LONG) and ask(*asked, **more))
        url = f"tcp://localhost:{free_port()}"
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=url)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        left = [thread for thread in threading.enumerate() if thread.name.startswith("connecting to localhost")]
        answers.set()
        assert "within 0.3 s: no name server answers. Is rank 0 up" in text
        assert ranks.seconds < SHORT + PROMPT
        for thread in left:
            thread.join(PROMPT)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_port_of_a_service_that_never_answers(self, fake, monkeypatch, rank):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            place = f"127.0.0.1:{other.getsockname()[1]}"
            if rank == 0:  # its server is elsewhere: as if the host were another machine's name
                monkeypatch.setattr(rendezvous, "_serve", lambda *_: None)

            url = f"tcp://{place}"
            ranks = Ranks([lambda: open_store("x", rank=rank, world_size=2, timeout=SHORT, rendezvous=url)])
            (text,) = raised(ranks.join(), StoreTimeoutError)
            left = [thread for thread in threading.enumerate() if thread.name == f"connecting to {place}"]

        assert f"no rendezvous at {place} within 0.3 s: something takes the connection there" in text
        assert "had not come" not in text
        assert ranks.seconds < SHORT + 1
        assert all(thread.daemon for thread in left)
        for thread in left:  # the service is gone: so is c10d's wait
            thread.join(PROMPT)

    def test_connecting_counts_against_the_timeout(self, fake, monkeypatch):
        """A rank that connects late has what is left, and names the rank that is not there: never itself."""
        wait = rendezvous._wait_for_server

        def slow(*arguments):
            time.sleep(SHORT)
            wait(*arguments)

        monkeypatch.setattr(rendezvous, "_wait_for_server", slow)
        url = f"tcp://127.0.0.1:{free_port()}"
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=2 * SHORT, rendezvous=url)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "0.6 s: rank 1 had not come" in text
        assert ranks.seconds < 2 * SHORT + 0.25

    def test_port_is_taken(self, fake):
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(DtorchError, match="rank 0 can't serve the rendezvous at 127.0.0.1"):
                open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous=url)


class TestEnvironment:
    """torchrun's variables count where its WORLD_SIZE is that of the opening."""

    @pytest.fixture
    def torchrun(self, site):
        site.env("MASTER_ADDR", "127.0.0.1")
        site.env("MASTER_PORT", str(free_port()))
        site.env("WORLD_SIZE", "2")
        return site

    def test_is_used(self, fake, torchrun):
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=2, timeout=SHORT)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert "open_store('x') at torchrun's environment (env://)" in text

    def test_is_not_used_for_another_size(self, fake, torchrun):
        ranks = Ranks([lambda: open_store("x", rank=0, world_size=3, timeout=SHORT)])
        (text,) = raised(ranks.join(), StoreTimeoutError)
        assert f"at process {os.getpid()}" in text

    def test_is_not_used_inside_a_spawn(self, fake, torchrun):
        assert spawn(lambda ctx: ctx.open_store("x", timeout=LONG).world_size, 2, timeout=LONG) == [2, 2]

    def test_agent_serves_the_store_itself(self, fake, torchrun):
        """torchrun keeps the server in its agent; a restart of the workers begins anew."""
        port = int(os.environ["MASTER_PORT"])
        agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        torchrun.env("TORCHELASTIC_USE_AGENT_STORE", "True")
        for restart in ("0", "1"):
            torchrun.env("TORCHELASTIC_RESTART_COUNT", restart)
            opened(2).join()
            assert agent.get(f"attempt {restart}/dtorch/store/x/openings") == b"1"

    @pytest.mark.parametrize(
        ("variable", "value"), [("MASTER_PORT", None), ("MASTER_PORT", "x"), ("MASTER_ADDR", None)]
    )
    def test_says_what_is_missing(self, fake, torchrun, variable, value):
        torchrun.env(variable, value)
        with pytest.raises(ValueError, match="needs MASTER_ADDR and MASTER_PORT"):
            open_store("x", rank=0, world_size=2, timeout=SHORT, rendezvous="env://")
