"""Groups that are made, split, destroyed or used by several threads, and ranks that are late, wrong or dead."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch_checks import LIMIT, all_gather_single, begin, expect_equal, part, total


class GroupChecks:
    """Each method is one check, and is called on every rank."""

    def monitored_barrier(self):
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=LIMIT, wait_all_ranks=True)
        group = dist.new_group()
        if self.rank == self.world - 1:
            dist.barrier()  # it comes too late for the other one
            return

        try:
            dist.monitored_barrier(group, timedelta(seconds=0.3))
        except RuntimeError as error:
            expected = f"Rank {self.world - 1} failed" if self.rank == 0 else f"Rank {self.rank} successfully reached"
            assert isinstance(error, TimeoutError) and expected in str(error), error
        else:
            raise AssertionError("a rank had not come")

        dist.barrier()

    def set_timeout(self):
        group = dist.new_group()
        set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # its name up to torch 2.13
        set_timeout(timedelta(seconds=0.3), group)
        if self.rank == 0:
            started = time.monotonic()
            try:
                dist.all_reduce(part(0), group=group)
            except TimeoutError as error:
                assert "rank 1" in str(error) and time.monotonic() - started < 5, error
            else:
                raise AssertionError("nobody else had come")

        dist.barrier()

    def groups(self):
        """Destroyed in another order on every other rank."""
        halves = [dist.new_group(list(self.ranks)[half::2]) for half in (0, 1)]
        mine, whole = halves[self.rank % 2], dist.new_group()
        x = part(self.rank)
        dist.all_reduce(x, group=mine)
        expect_equal(x, total(self.ranks[self.rank % 2 :: 2]))
        dist.all_reduce(x := part(self.rank), group=whole)
        expect_equal(x, total(self.ranks))
        for group in (mine, whole) if self.rank % 2 else (whole, mine):
            dist.destroy_process_group(group)

        # torch 2.14 counts them in the names of later groups: so every rank has one.
        first = self.rank // 2 * 2
        local = dist.new_group([first, first + 1], use_local_synchronization=True)
        dist.all_reduce(x := part(self.rank), group=local)
        expect_equal(x, total((first, first + 1)))

    def split_group(self):
        for _ in range(2):
            group = dist.split_group(split_ranks=[[0, 1]])
            if self.rank > 1:
                assert group in (None, dist.GroupMember.NON_GROUP_MEMBER)  # torch 2.13, 2.14
                continue

            assert (group.rank(), group.size(), dist.get_backend(group)) == (self.rank, 2, self.backend)
            dist.all_reduce(x := part(self.rank), group=group)
            expect_equal(x, total((0, 1)))
            alone = dist.split_group(group, [[0], [1]])
            dist.all_reduce(x := part(self.rank), group=alone)
            expect_equal(x, part(self.rank))
            dist.destroy_process_group(group if self.rank else alone)

        for wrong in ([], [[]], [[0], [0, 1]], [[self.world]]):
            try:
                dist.split_group(split_ranks=wrong)
            except ValueError:
                continue

            raise AssertionError(f"{wrong} was taken")

    def groups_in_several_threads(self):
        groups, errors = [dist.new_group() for _ in range(3)], []

        def use(number, group):
            try:
                for turn in range(30):
                    x = part(self.rank) + 100 * number + turn
                    dist.all_reduce(x, group=group)
                    expect_equal(x, total(self.ranks) + (100 * number + turn) * self.world)
                    whole = all_gather_single(part(self.rank) + number, 0, group) + 0
                    expect_equal(whole, torch.cat([part(rank) + number for rank in self.ranks]))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=one, daemon=True) for one in enumerate(groups)]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(LIMIT.total_seconds())
            assert not thread.is_alive()

        if errors:
            raise errors[0]

    def mismatch_is_told(self):
        group = dist.new_group()
        try:
            dist.all_reduce(part(0, 3 + self.rank), group=group)
        except RuntimeError as error:
            assert "rank 0: all_reduce(float32[3], sum)" in str(error), error
        else:
            raise AssertionError("the ranks called different things")

        dist.all_reduce(x := part(self.rank), group=group)
        expect_equal(x, total(self.ranks))

    def destroyed_and_begun_again(self):
        dist.new_group([0])
        dist.destroy_process_group()
        begin(*sys.argv[1:5])
        dist.all_reduce(x := part(self.rank))
        expect_equal(x, total(self.ranks))

    def a_rank_that_dies(self):
        """The last rank is killed in the middle. The others are told at once, and can destroy what they have."""
        group, victim = dist.new_group(), self.world - 1
        works = [dist.all_reduce(part(self.rank), group=one, async_op=True) for one in (group, None)]
        for work in works:
            work.wait()

        if self.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

        started = time.monotonic()
        for one in (group, None):
            try:
                dist.all_reduce(part(self.rank), group=one)
            except RuntimeError as error:
                assert isinstance(error, ConnectionError) and f"rank {victim} (pid " in str(error), error
            else:
                raise AssertionError(f"rank {victim} is dead")

        dist.destroy_process_group(group)
        dist.destroy_process_group()
        assert time.monotonic() - started < 5
