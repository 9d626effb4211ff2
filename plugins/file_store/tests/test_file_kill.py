"""Processes that are killed at every step of a session: what the others see, and what is left of them."""

import socket
import time
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_kill_ranks")
    import file_kill_ranks as processes
    from file_kill_ranks import CONSUMER, OTHER, PRODUCER, Row

pool, ranks = processes.pool, processes.ranks  # fixtures

pytest.importorskip("dtorch_samedevice_group")

NUMEL = 1 << 16
"""Elements of a tensor that is reduced."""

COLLECTIVES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
    "send and recv",
]

STEPS = {
    # when: who is killed, what was done before (rank, command), and what each survivor waits in.
    "producer, after opening": (PRODUCER, [], {CONSUMER: ("get", "k")}),
    "producer, after src_set": (PRODUCER, [(PRODUCER, "set", "k", 1)], {CONSUMER: ("get", "next")}),
    "producer, after dest_get": (
        PRODUCER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k")],
        {CONSUMER: ("barrier",)},
    ),
    "producer, after dest_finish_get": (
        PRODUCER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k"), (CONSUMER, "finish", "k")],
        {CONSUMER: ("get", "k")},
    ),
    "producer, in its wait": (
        PRODUCER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k"), (PRODUCER, "begin", "wait", "k")],
        {CONSUMER: ("get", "next")},
    ),
    "consumer, after opening": (CONSUMER, [(PRODUCER, "set", "k", 1)], {PRODUCER: ("wait", "k")}),
    "consumer, in its wait": (
        CONSUMER,
        [(CONSUMER, "begin", "get", "never"), (PRODUCER, "set", "k", 1)],
        {PRODUCER: ("wait", "k")},
    ),
    "consumer, after dest_get": (
        CONSUMER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k")],
        {PRODUCER: ("wait", "k")},
    ),
    "consumer, after dest_finish_get": (
        CONSUMER,
        [(PRODUCER, "set", "k", 1), (CONSUMER, "get", "k"), (CONSUMER, "finish", "k"), (PRODUCER, "wait", "k")],
        {PRODUCER: ("barrier",)},
    ),
    "in a barrier": (CONSUMER, [(PRODUCER, "set", "k", 1), (CONSUMER, "begin", "barrier")], {PRODUCER: ("wait", "k")}),
    "in reset": (CONSUMER, [(PRODUCER, "set", "k", 1), (CONSUMER, "begin", "reset")], {PRODUCER: ("wait", "k")}),
    "before reset": (CONSUMER, [], {PRODUCER: ("reset",)}),
}


class TestKill:
    @pytest.mark.parametrize("world_size", [2, 3])
    @pytest.mark.parametrize("step", STEPS)
    def test_survivors_learn_it_at_once_and_nothing_is_left(self, ranks, step, world_size):
        victim, before, waits = STEPS[step]
        row = Row(ranks, world_size, victim)
        for rank, name, *given in before:
            if name == "begin":
                row.processes[rank].waits(*given)
            else:
                row.processes[rank].do(name, *given)

        for rank, survivor in row.survivors.items():
            # The third one waits where it can, without letting the others through.
            other = ("barrier",) if step == "in a barrier" else ("reset",) if step == "in reset" else ("get", "never")
            survivor.waits(*waits.get(rank, other))

        row.kill()
        row.end()

    @pytest.mark.parametrize("scheme", ["file", "tcp"])
    def test_ranks_that_met_at_a_url(self, ranks, scheme):
        with socket.socket() as probe:  # bound and closed: free, and not handed out again soon
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        row = Row(ranks, 2, CONSUMER, rendezvous=ranks.rendezvous if scheme == "file" else f"tcp://127.0.0.1:{port}")
        row.survivors[PRODUCER].waits("get", "k")
        row.kill()
        row.end()

    @pytest.mark.parametrize("collective", COLLECTIVES)
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_inside_a_collective(self, ranks, collective, world_size):
        """All are in it, again and again."""
        row = Row(ranks, world_size, CONSUMER, "group")
        for process in row.processes:
            process.tell("collective", collective, NUMEL, True)

        time.sleep(0.05)  # somewhere in it: each run elsewhere
        row.kill()
        row.end()

    @pytest.mark.parametrize("collective", COLLECTIVES[:-1])
    def test_waiting_in_a_collective(self, ranks, collective):
        """One rank has not come; another one, which waits, dies."""
        row = Row(ranks, 3, CONSUMER, "group")
        for process in row.processes[:2]:
            process.waits("collective", collective, NUMEL)

        row.processes[OTHER].waits("collective", "recv", NUMEL)
        row.kill()
        row.end()
