"""spawn(torch_distributed=True): each rank that is a thread has a torch.distributed of its own."""

import copy
import functools
import gc
import importlib
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtorch_core import PeerLostError, RankFailedError, UnsupportedOperationError, _thread_world, spawn

LIMIT = 30.0


def run(fn, world_size=4, **named):
    return spawn(fn, world_size, torch_distributed=True, timeout=LIMIT, **named)


def rows(rank, count=4):
    """Values that say whose they are, and where."""
    return torch.arange(float(count)) + 10 * rank


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """This file as a module that other processes can import."""
    (tmp_path / "thread_world_ranks.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("thread_world_ranks")
    sys.modules.pop("thread_world_ranks")


def from_every_kind_of_group(ctx):
    """What needs to hold wherever the ranks are."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = rows(rank)
    dist.all_reduce(x)
    gathered = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(gathered, rows(rank))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rows(rank)
    dist.all_reduce(half, group=halves[rank // 2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row = functional.all_reduce(rows(rank), "sum", mesh["tp"]).wait()
    return rank, world_size, x, torch.stack(gathered), half, row, [member == ctx.rank for member in (rank,)]


def check_every_kind_of_group(results):
    for rank, (own, world_size, total, gathered, half, row, same) in enumerate(results):
        first = rank // 2 * 2
        assert (own, world_size, same) == (rank, 4, [True])
        assert torch.equal(total, sum(map(rows, range(4))))
        assert torch.equal(gathered, torch.stack([*map(rows, range(4))]))
        assert torch.equal(half, rows(first) + rows(first + 1))
        assert torch.equal(row, rows(first) + rows(first + 1))


class Summed(torch.autograd.Function):
    """The values as they are; in backward, the sum of the gradients of a group's ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def from_groups_in_use_at_once(ctx):
    """What each of a rank's threads got from a group of its own, forward and backward; and torch's level of checks."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = [dist.group.WORLD, pairs[rank // 2], dist.new_group()]

    def use(number, group):
        got = []
        for turn in range(10):
            x = rows(rank) + 100 * number + turn
            dist.all_reduce(x, group=group)
            y = rows(rank).requires_grad_()
            (Summed.apply(y, group) * (rows(rank) + 100 * number + turn)).sum().backward()
            got.append((number, turn, x, functional.all_reduce(y.grad, "sum", group).wait()))

        return got

    with ThreadPoolExecutor(len(groups)) as pool:
        each = pool.map(use, range(len(groups)), groups, timeout=LIMIT)
        return dist.get_debug_level().name, [one for got in each for one in got]


@pytest.fixture
def level(request):
    """The level of torch's own checks, as TORCH_DISTRIBUTED_DEBUG sets it."""
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, request.param))
    yield request.param
    dist.set_debug_level(before)


class TestCollectives:
    def test_every_kind_of_group_works_in_threads(self):
        check_every_kind_of_group(run(from_every_kind_of_group))

    @pytest.mark.parametrize("threads_per_process", [1, 2])
    def test_every_kind_of_group_works_in_processes(self, elsewhere, threads_per_process):
        results = spawn(
            elsewhere.from_every_kind_of_group, 4, ranks_as="processes", threads_per_process=threads_per_process,
            torch_distributed=True, timeout=100,
        )  # fmt: skip
        check_every_kind_of_group(results)

    @pytest.mark.parametrize("level", ["OFF", "DETAIL"], indirect=True)
    def test_groups_in_use_at_once_are_apart(self, level):
        for rank, (found, got) in enumerate(run(from_groups_in_use_at_once)):
            assert found == level and len(got) == 30
            for number, turn, total, grad in got:
                members = [rank // 2 * 2, rank // 2 * 2 + 1] if number == 1 else range(4)
                expected = sum(rows(member) + 100 * number + turn for member in members)
                assert torch.equal(total, expected)
                assert torch.equal(grad, len(members) * expected)

    def test_groups_are_numbered_by_each_rank_alone(self):
        def rank(ctx):
            first = ctx.rank // 2 * 2
            for _ in range(3):
                dist.new_group([first, first + 1], use_local_synchronization=True)

            everybody = dist.new_group()
            x = rows(ctx.rank)
            dist.all_reduce(x, group=everybody)
            return x, distributed_c10d._world.pg_names[everybody]

        results = run(rank)
        assert len({name for _, name in results}) == 1
        for x, _ in results:
            assert torch.equal(x, sum(map(rows, range(4))))

    def test_a_group_can_be_destroyed_and_made_again(self):
        def rank(ctx):
            for number in range(3):
                dist.destroy_process_group()
                assert not dist.is_initialized()
                store = dist.PrefixStore(f"again {number}", ctx._scope.rendezvous)
                dist.init_process_group("dtorch", store=store, rank=ctx.rank, world_size=ctx.world_size)
                x = rows(ctx.rank)
                dist.all_reduce(x)
                assert torch.equal(x, rows(0) + rows(1))

        run(rank, 2)

    def test_ranks_that_end_at_different_times_do_not_take_away_the_others_groups(self):
        ended = threading.Event()

        def rank(ctx):
            pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][ctx.rank // 2]
            if ctx.rank < 2:
                dist.destroy_process_group()
                return None

            assert ended.wait(LIMIT)
            return functional.all_reduce(rows(ctx.rank), "sum", pair).wait()

        threading.Timer(0.3, ended.set).start()
        results = run(rank)
        assert torch.equal(results[2], rows(2) + rows(3)) and torch.equal(results[3], rows(2) + rows(3))

    def test_one_rank_is_enough(self):
        assert run(lambda ctx: (dist.get_rank(), dist.get_world_size()), 1) == [(0, 1)]


class TestAutograd:
    def test_collectives_in_backward_are_the_ranks_own(self):
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                total = grad.clone()
                dist.all_reduce(total)
                return functional.all_reduce(total, "sum", dist.group.WORLD).wait()

        def rank(ctx):
            x = rows(ctx.rank).requires_grad_()
            (Sum.apply(x) * rows(ctx.rank)).sum().backward()
            return x.grad

        for grad in run(rank):
            assert torch.equal(grad, 4 * sum(map(rows, range(4))))

    @pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is deprecated")
    @pytest.mark.parametrize("imported", ["before", "in a rank", "with a group"])
    def test_collectives_that_have_a_gradient_are_the_ranks_own(self, monkeypatch, imported):
        name = "torch.distributed.nn.functional"
        monkeypatch.delitem(sys.modules, name, raising=False)
        if imported != "in a rank":
            hook = sys.excepthook
            if imported == "with a group":
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

            module = importlib.import_module(name)
            before = module.all_reduce.__defaults__
            if imported == "with a group":
                dist.destroy_process_group()
                sys.excepthook, distributed_c10d._backend = hook, None

        def rank(ctx):
            y = rows(ctx.rank).requires_grad_()
            total = importlib.import_module(name).all_reduce(y * (ctx.rank + 1))
            total.sum().backward()
            return total.detach(), y.grad

        for number, (total, grad) in enumerate(run(rank)):
            assert torch.equal(total, sum(rows(other) * (other + 1) for other in range(4)))
            assert torch.equal(grad, torch.full((4,), 4.0 * (number + 1)))

        after = importlib.import_module(name).all_reduce.__defaults__
        if imported == "in a rank":
            assert after[1] is None
        else:
            assert after is before

    @pytest.mark.parametrize("level", ["OFF", "DETAIL"], indirect=True)
    @pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
    def test_training_is_that_of_one_rank(self, sharded, level):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        x, y = torch.randn(8, 8), torch.randn(8, 4)

        def train(model, x, y):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()

        def rank(ctx):
            own = copy.deepcopy(model)
            if sharded:
                from torch.distributed.fsdp import fully_shard

                mesh = init_device_mesh("cpu", (4,))
                for layer in (own[0], own[2], own):
                    fully_shard(layer, mesh=mesh)

                train(own, x.chunk(4)[ctx.rank], y.chunk(4)[ctx.rank])
                return [parameter.full_tensor().detach() for parameter in own.parameters()]

            train(nn.parallel.DistributedDataParallel(own), x.chunk(4)[ctx.rank], y.chunk(4)[ctx.rank])
            return [parameter.detach() for parameter in own.parameters()]

        results = run(rank)
        train(model, x, y)
        for parameters in results:
            for own, expected in zip(parameters, model.parameters(), strict=True):
                torch.testing.assert_close(own, expected.detach(), rtol=1e-5, atol=1e-6)

    def test_ddp_is_told_who_left(self):
        def rank(ctx):
            model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
            if ctx.rank == 0:
                return "left"

            with pytest.raises(RuntimeError, match=r"rank 0 .*has left"):  # C++ reads the future of the all_reduce
                model(rows(ctx.rank, 3)).sum().backward()

        assert run(rank, 2)[0] == "left"


class TestTensors:
    def test_dtensors_of_different_ranks_are_kept_apart(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        whole = torch.arange(48.0).view(8, 6)

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2, 2))
            x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
            turned = x.redistribute(mesh, [Shard(1), Replicate()]).redistribute(mesh, [Shard(0), Shard(1)])
            return (x @ x.T).full_tensor(), turned.to_local(), (x.sum() + 1).full_tensor()

        for number, (product, shard, total) in enumerate(run(rank)):
            assert torch.equal(product, whole @ whole.T)
            assert torch.equal(shard, whole.chunk(2)[number // 2].chunk(2, 1)[number % 2])
            assert total == whole.sum() + 1

    def test_loss_parallel_is_the_ranks_that_is_in_it(self):
        from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import loss_parallel

        logits, classes = torch.arange(12.0).view(3, 4).sin(), torch.tensor([3, 0, 2])
        one_is_out = threading.Event()

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2,))
            x = distribute_tensor(logits.clone().requires_grad_(), mesh, [Shard(1)])
            alone = DTensor.from_local(logits, mesh, [Replicate()])
            with loss_parallel():
                nn.functional.cross_entropy(x, classes).backward()
                if ctx.rank == 1:
                    assert one_is_out.wait(LIMIT)

            logged = torch.log_softmax(alone, 1).to_local()
            one_is_out.set()
            return x.grad.full_tensor(), logged

        expected = logits.clone().requires_grad_()
        nn.functional.cross_entropy(expected, classes).backward()
        for grad, logged in run(rank, 2):
            torch.testing.assert_close(grad, expected.grad)
            torch.testing.assert_close(logged, torch.log_softmax(logits, 1))

    def test_meshes_of_different_ranks_differ(self):
        meshes = run(lambda ctx: init_device_mesh("cpu", (2,)), 2)
        assert meshes[0] != meshes[1] and hash(meshes[0]) != hash(meshes[1])

    def test_a_mesh_that_another_rank_has_pickled_is_this_ranks(self):
        sent = []
        there = threading.Event()

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2,))
            if ctx.rank == 0:
                sent.append(pickle.dumps(mesh))
                there.set()

            assert there.wait(LIMIT)
            received = pickle.loads(sent[0])
            assert received.get_group() is dist.group.WORLD
            return functional.all_reduce(rows(ctx.rank), "sum", received).wait()

        for total in run(rank, 2):
            assert torch.equal(total, rows(0) + rows(1))


class TestThreadsOfARank:
    def test_a_cached_property_may_be_collective(self):
        """Up to Python 3.11 it has one lock for all objects."""

        class Job:
            @functools.cached_property
            def total(self):
                return functional.all_reduce(rows(dist.get_rank()), "sum", dist.group.WORLD).wait()

        def body(ctx):
            job = Job()
            return job.total, job.total is job.total, Job.total

        for total, kept, itself in run(body):
            assert torch.equal(total, sum(rows(rank) for rank in range(4)))
            assert kept and itself is vars(Job)["total"]

    def test_a_thread_that_a_rank_starts_is_the_ranks(self):
        def rank(ctx):
            seen = []

            def helper():
                x = functional.all_reduce(rows(dist.get_rank()), "sum", dist.group.WORLD).wait()
                seen.append((dist.get_rank(), x, torch.autograd._is_multithreading_enabled_flag()))

            def is_multithreaded():
                return torch._C._is_multithreading_enabled()

            torch.autograd._is_multithreading_enabled_flag = is_multithreaded
            thread = threading.Thread(target=helper)
            thread.start()
            thread.join(LIMIT)
            return seen[0]

        try:
            for number, (own, total, multithreaded) in enumerate(run(rank)):
                assert own == number and not multithreaded
                assert torch.equal(total, sum(map(rows, range(4))))
        finally:
            del torch.autograd._is_multithreading_enabled_flag


def state():
    """What the shim changes in torch and Python."""
    return {
        "world": distributed_c10d._world,
        "backend": distributed_c10d._backend,
        "names": [vars(distributed_c10d)[name] for name in vars(distributed_c10d) if "register" in name],
        "mesh": [vars(DeviceMesh)[name] for name in ("__init__", "__setstate__")],
        "rank": torch._C._distributed_c10d._set_global_rank,
        "ddp": nn.parallel.DistributedDataParallel._active_ddp_module,
        "thread": threading.Thread.start,
        "property": functools.cached_property.__get__,
        "hook": sys.excepthook,
        "tracker": type(sys.modules.get("torch.distributed.tensor._random")),
        "lock": getattr(
            getattr(sys.modules.get("torch.distributed.tensor._sharding_prop"), "ShardingPropagator", None),
            "_fake_mode_lock", None,
        ),
    }  # fmt: skip


class TestOutside:
    @pytest.fixture(autouse=True)
    def torch_is_as_before(self):
        import torch.distributed.tensor  # noqa: F401 - which the first mesh of a rank imports

        before = state()
        yield
        assert state() == before
        assert not dist.is_initialized()

    def test_torch_is_as_before_after_a_run(self):
        run(lambda ctx: init_device_mesh("cpu", (2,)).size(), 2)

    def test_torch_is_as_before_after_a_failure(self):
        def rank(ctx):
            init_device_mesh("cpu", (2, 2))
            if ctx.rank == 2:
                raise ValueError("no")

            dist.barrier()

        with pytest.raises(RankFailedError, match="rank 2 of 4 failed with ValueError: no"):
            run(rank)

    def test_torch_is_as_before_where_the_group_can_not_be_opened(self, monkeypatch):
        monkeypatch.setenv("DTORCH_THREAD_GROUP", "nonesuch")
        with pytest.raises(RankFailedError, match="nonesuch"):
            run(lambda ctx: None, 2)

    def test_ranks_without_their_own_see_the_process(self):
        assert spawn(lambda ctx: dist.is_initialized(), 2) == [False, False]

    def test_spawn_inside_of_a_rank_is_inside_of_its_world(self):
        def rank(ctx):
            plain = spawn(lambda inner: dist.get_rank(), 2)
            divided = spawn(lambda inner: dist.get_rank(), 2, torch_distributed=True)
            x = rows(ctx.rank)
            dist.all_reduce(x)
            return plain, divided, x

        for number, (plain, divided, x) in enumerate(run(rank, 2)):
            assert plain == [number, number] and divided == [0, 1]
            assert torch.equal(x, rows(0) + rows(1))

    def test_nothing_of_a_rank_is_kept(self):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        groups = []

        def rank(ctx):
            groups.append(weakref.ref(dist.group.WORLD))
            mesh = init_device_mesh("cpu", (2,))
            x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
            return (x @ x.T).redistribute(mesh, [Replicate()]).to_local().sum().item()

        for _ in range(3):
            run(rank, 2)

        gc.collect()
        assert sum(group() is not None for group in groups) <= 2  # those of the last run, at most

    def test_two_runs_at_once_are_apart(self):
        inside = threading.Barrier(4, timeout=LIMIT)

        def rank(ctx):
            inside.wait()
            x = rows(ctx.rank)
            dist.all_reduce(x)
            inside.wait()
            return x

        results = {}
        threads = [
            threading.Thread(target=lambda number=number: results.update({number: run(rank, 2)})) for number in range(2)
        ]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(LIMIT)

        for number in range(2):
            assert all(torch.equal(x, rows(0) + rows(1)) for x in results[number])

    def test_the_process_keeps_its_own_groups_meanwhile(self):
        before = sys.excepthook, distributed_c10d._backend
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        hook = sys.excepthook
        came, seen = threading.Barrier(3, timeout=LIMIT), threading.Barrier(3, timeout=LIMIT)

        def rank(ctx):
            mesh = init_device_mesh("cpu", (2,))
            came.wait()
            seen.wait()  # the outer group is gone now
            return functional.all_reduce(rows(ctx.rank), "sum", mesh).wait()

        results = []
        ranks = threading.Thread(target=lambda: results.extend(run(rank, 2)))
        ranks.start()
        came.wait()
        try:
            assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
            assert dist.group.WORLD.group_name == "0" and sys.excepthook is hook
            assert torch.equal(functional.all_reduce(rows(3), "sum", "0").wait(), rows(3))
            mesh = init_device_mesh("cpu", (1,))
            # Of the group itself, or of a new one: where there is a GPU, torch gives a mesh over Gloo one for both.
            assert mesh._thread_id is None and dist.get_process_group_ranks(mesh.get_group()) == [0]
            assert torch.equal(functional.all_reduce(rows(4), "sum", mesh).wait(), rows(4))
        finally:
            dist.destroy_process_group()
            seen.wait()
            ranks.join(LIMIT)
            sys.excepthook, distributed_c10d._backend = before  # c10d leaves its own behind

        assert all(torch.equal(x, rows(0) + rows(1)) for x in results) and len(results) == 2


class TestFailures:
    def test_a_rank_that_fails_wakes_the_others(self):
        def rank(ctx):
            dist.barrier()
            if ctx.rank == 1:
                raise ValueError("no")

            try:
                dist.all_reduce(rows(ctx.rank))
            except PeerLostError as error:
                heard.append(str(error))
                raise

        heard = []
        with pytest.raises(RankFailedError, match="rank 1 of 4 failed with ValueError: no"):
            run(rank)

        assert len(heard) == 3 and all("rank 1 failed: ValueError: no" in text for text in heard)

    def test_what_torch_lacks_is_said(self, monkeypatch):
        monkeypatch.setattr(_thread_world, "MISSING", ["_World has no property pg_map"])
        with pytest.raises(UnsupportedOperationError, match="threads: _World has no property pg_map. Use"):
            run(lambda ctx: None, 2)

    def test_a_new_variable_of_the_module_is_missed(self, monkeypatch):
        monkeypatch.setattr(distributed_c10d, "_pg_colours", {}, raising=False)
        monkeypatch.setattr(
            distributed_c10d._World,
            "pg_colours",
            property(eval("lambda self: _pg_colours", vars(distributed_c10d))),
            raising=False,
        )
        [missed] = _thread_world.missing()
        assert missed == "_World.pg_colours is kept in a variable of the module that is not known here"

    def test_nothing_is_missed_in_this_torch(self):
        assert _thread_world.MISSING == []
