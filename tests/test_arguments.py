"""What is refused in the caller: it says what, where and the way out, and leaves the others in no doubt."""

from __future__ import annotations

import copy
import math
import os
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dtorch_core import DtorchError, UnsupportedTensorError, make_promise, open_store, spawn
from dtorch_core._meeting import rendezvous as _rendezvous
from dtorch_core.checks import LONGEST, check_timeout, check_written
from dtorch_core.testing import run_ranks

pytest.importorskip("dtorch_samedevice_group")

LIMIT = 30.0
NO_SECONDS = [(-1, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("1", TypeError), (True, TypeError)]


def on_groups(body, timeout=LIMIT):
    def rank(ctx):
        with ctx.open_group(timeout=timeout) as group:
            got = body(group)
            assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
            return got

    return run_ranks(rank, 2, LIMIT)


class TestRoot:
    CALLS = {
        "broadcast": lambda group, x, root: group.broadcast(x, root),
        "reduce": lambda group, x, root: group.reduce(x, root),
        "gather": lambda group, x, root: group.gather(x, root),
        "scatter": lambda group, x, root: group.scatter([x, x], root),
    }

    @pytest.mark.parametrize("root", [None, 1.0, "0", True], ids=repr)
    @pytest.mark.parametrize("call", CALLS)
    def test_it_is_a_rank(self, call, root):
        def body(group):
            with pytest.raises(TypeError, match=f"{call}.*a rank is an int, not {root!r}"):
                self.CALLS[call](group, torch.ones(3), root)

        on_groups(body)


class TestOut:
    @pytest.mark.parametrize(
        ("size", "stride"), [((2, 3), (1, 1)), ((3,), (0,)), ((3, 2), (2, 2)), ((2, 2, 2), (3, 2, 1))], ids=repr
    )
    def test_elements_that_share_memory(self, size, stride):
        def body(group):
            x = torch.arange(math.prod(size), dtype=torch.float32).reshape(size)
            with pytest.raises(UnsupportedTensorError, match="its elements share memory; clone it"):
                group.all_reduce(x, out=torch.empty(20).as_strided(size, stride))

        on_groups(body)

    @pytest.mark.parametrize(
        ("size", "stride"),
        [((2, 2), (2, 3)), ((3, 2), (1, 3)), ((2, 1), (5, 0)), ((0, 3), (1, 1)), ((2, 3, 4), (12, 4, 1)), ((), ())],
        ids=repr,
    )
    def test_elements_that_do_not(self, size, stride):
        def body(group):
            x = torch.arange(math.prod(size), dtype=torch.float32).reshape(size)
            out = torch.empty(40).as_strided(size, stride)
            assert torch.equal(group.all_reduce(x, out=out), 2 * x)

        on_groups(body)

    def test_many_elements_between_each_other(self):
        for default in ("cpu", "meta"):
            with torch.device(default):
                check_written("here", torch.empty(9, device="cpu").as_strided((2, 2), (2, 3)))

        woven = torch.empty(5000, dtype=torch.uint8).as_strided((1025, 1025), (2, 2))
        with pytest.raises(UnsupportedTensorError, match=r"a tensor of strides \(2, 2\)"):
            check_written("here", woven)


class TestSeconds:
    @pytest.mark.parametrize(("timeout", "error"), NO_SECONDS, ids=repr)
    @pytest.mark.parametrize("ranks_as", ["threads", "processes"])
    def test_of_a_run(self, ranks_as, timeout, error):
        with pytest.raises(error, match="spawn: timeout must be a .*number of seconds"):
            spawn(print, 1, ranks_as=ranks_as, timeout=timeout)

    @pytest.mark.parametrize(("timeout", "error"), NO_SECONDS, ids=repr)
    def test_of_a_works_wait(self, timeout, error):
        def body(group):
            work = group.all_reduce(torch.ones(1), async_op=True)
            with pytest.raises(error, match="all_reduce.*: wait: timeout must be a .*number of seconds"):
                work.wait(timeout)

            assert work.wait(timedelta(seconds=LIMIT))

        on_groups(body)

    @pytest.mark.parametrize(("timeout", "error"), NO_SECONDS, ids=repr)
    def test_of_a_call(self, timeout, error):
        said = "a finite number of seconds, at least 0" if error is ValueError else "a number of seconds"

        def body(group):
            with pytest.raises(ValueError, match=f"'world', rank {group.rank}, barrier: timeout must be {said}, not "):
                group.barrier(timeout=timeout)

            group.barrier()

        on_groups(body)

    @pytest.mark.parametrize("timeout", [math.nan, "1", True], ids=repr)
    def test_of_a_future(self, timeout):
        promise = make_promise()
        with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
            promise.future().result(timeout)

    @pytest.mark.parametrize("timeout", [1e10, 1e300, 10**400], ids=["1e10", "1e300", "10**400"])
    def test_more_than_any_clock_counts(self, timeout):
        def body(group):
            work = group.all_gather(torch.ones(1), async_op=True, timeout=timeout)
            assert work.wait(timeout) and work.result().tolist() == [1, 1]
            group.barrier(timeout=timeout)

        on_groups(body, timeout)

    def test_they_are_what_was_said_or_the_longest(self):
        assert check_timeout("here", 2.5) == 2.5
        assert check_timeout("here", 10**400) == LONGEST
        assert str(check_timeout("here", -0.0)) == "0"


def test_devices_of_a_run():
    with pytest.raises(TypeError, match="spawn: devices must be one device for all ranks or a sequence of one each"):
        spawn(print, 2, devices=5)


@pytest.mark.parametrize("ranks", [1, [0.5, 1], ["0"], None], ids=repr)
def test_ranks_of_a_managers_group(ranks):
    def rank(ctx):
        with ctx.open_manager() as manager, pytest.raises(TypeError, match="get takes a sequence of ranks"):
            manager.get(ranks)

    run_ranks(rank, 2, LIMIT)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda how: how.__name__)
@pytest.mark.parametrize("kind", ["store", "group", "manager"])
def test_what_belongs_to_a_rank_is_not_copied(kind, how):
    def rank(ctx):
        opens = {"store": lambda: ctx.open_store("s"), "group": ctx.open_group, "manager": ctx.open_manager}
        with opens[kind]() as handle, pytest.raises(TypeError, match="every rank makes its own"):
            how(handle)

    run_ranks(rank, 2, LIMIT)


class TestRendezvousFile:
    def refused(self, path):
        with pytest.raises(DtorchError, match="file:///.* can't be used: it holds something else than the records"):
            open_store("x", rank=0, world_size=2, timeout=LIMIT, rendezvous=f"file://{path}")

    @pytest.mark.parametrize("held", [b"hello world\n", b"\xff" * 64, b"\0"], ids=["text", "ones", "a byte"])
    def test_it_holds_something_else(self, tmp_path, held):
        (tmp_path / "file").write_bytes(held)
        self.refused(tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == held

    def test_its_last_record_is_cut_short(self, tmp_path):
        store = dist.FileStore(str(tmp_path / "whole"), 2)
        store.set("key", "value" * 20)
        (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-7])
        self.refused(tmp_path / "cut")

    def test_one_that_is_being_written_is_waited_for(self, tmp_path, monkeypatch):
        """What looks cut short is looked at again."""
        store = dist.FileStore(str(tmp_path / "whole"), 2)
        store.set("key", "value")
        whole, path = (tmp_path / "whole").read_bytes(), tmp_path / "file"
        path.write_bytes(whole[:-3])
        self.between_looks(monkeypatch, lambda: path.write_bytes(whole))
        _rendezvous._check_records(os.fspath(path), 10.0)

    def test_one_that_something_else_writes_on_and_on_is_given_up_in_time(self, tmp_path, monkeypatch):
        path = tmp_path / "log"
        path.write_bytes(b"a line\n")
        looks = self.between_looks(monkeypatch, lambda: path.write_bytes(path.read_bytes() + b"a line\n"))
        with pytest.raises(OSError, match="something else than the records"):
            _rendezvous._check_records(os.fspath(path), 10.0)

        assert len(looks) == 11

    def between_looks(self, monkeypatch, happens):
        """A second is over between two looks, in which something ``happens``; the seconds that were."""
        looks = []
        clock = SimpleNamespace(monotonic=lambda: float(len(looks)), sleep=lambda seconds: looks.append(happens()))
        monkeypatch.setattr(_rendezvous, "time", clock)
        return looks
