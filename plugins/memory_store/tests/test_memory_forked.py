"""A process that is forked from thread ranks: it is told that the ranks are not there."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from dtorch_core import ProtocolError
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_ranks import LIMIT

CALLS = {
    "src_set": lambda store: store.src_set("k", torch.ones(2), 1),
    "dest_get": lambda store: store.dest_get("there"),
    "barrier": lambda store: store.barrier(),
    "empty": lambda store: store.empty((2,), dtype=torch.float32),
    "send": lambda store: store.send(torch.ones(2), 0, 0),
}


def in_child(check):
    """What ``check()`` says in a forked child: "" if it holds."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        said = "it never ended"
        try:
            signal.alarm(int(LIMIT))
            check()
            said = ""
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)

    os.close(writing)
    with open(reading, "rb") as line:
        said = line.read().decode()

    return said, os.waitpid(pid, 0)[1]


def check_said(said):
    assert said == [("", 0)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("held", [False, True], ids=["", "while another rank holds the session's lock"])
def test_it_is_refused(held):
    def rank(ctx):
        with ctx.open_store("kept", backend="memory", timeout=LIMIT) as store:
            if ctx.rank == 1:
                store.src_set("there", torch.ones(2), 1)
                with store._session.presence.mutex if held else threading.Lock():
                    ready.set()
                    done.wait(LIMIT)

                return store.barrier()

            ready.wait(LIMIT)

            def check():
                for call in CALLS.values():
                    with pytest.raises(ProtocolError, match=f"opened in pid {os.getppid()}.* forked from it"):
                        call(store)

                store.close()

            opener = os.getpid()

            def check_in_its_child():
                with pytest.raises(ProtocolError, match=f"opened in pid {opener}, and this is pid {os.getpid()}"):
                    store.barrier()

            assert in_child(lambda: said.append(in_child(check_in_its_child)) or check_said(said)) == ("", 0)
            assert in_child(check) == ("", 0)
            done.set()
            assert store.dest_get("there").tolist() == [1, 1]
            store.dest_finish_get("there")
            store.barrier()

    said, ready, done = [], threading.Event(), threading.Event()
    run_ranks(rank, 2, 2 * LIMIT)
