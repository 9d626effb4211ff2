"""dtorch run: a torchrun script, unmodified, whose ranks are threads of one process, or processes."""

import multiprocessing
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dtorch_core._spawn import script_groups
from dtorch_core.cli import main

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import script_runs

run = script_runs.run

NCCL_NAMES = [
    name
    for name in ("nccl-legacy", "nccl2", "nccl-lazy")
    if metadata.entry_points(group="torch.distributed.backends", name=name)
]
"""What torch has besides ``nccl``, since 2.14."""


class TestScript:
    def test_each_rank_says_who_it_is(self, run):
        body = """
        if __name__ == "__main__":
            dist.init_process_group("gloo")
            x = torch.arange(3) + 10 * dist.get_rank()
            dist.all_reduce(x)
            print(rank, os.environ["LOCAL_RANK"], os.getenv("LOCAL_WORLD_SIZE"), dist.get_world_size(), x.tolist())
            dist.destroy_process_group()
        """
        status, out, err = run(body, nproc=3)
        assert status == 0
        assert out == [f"[rank {rank}] {rank} {rank} 3 3 [30, 33, 36]" for rank in range(3)]
        assert err == ["dtorch run: the script asks for 'gloo': 3 ranks on cpu use samedevice"]

    @pytest.mark.parametrize(
        ("call", "shown"),
        [
            ("'nccl'", "'nccl'"),
            ("backend='nccl', init_method='env://'", "'nccl'"),
            ("'cpu:gloo,cuda:nccl'", "'cpu:gloo,cuda:nccl'"),
            ("", "a process group without naming a backend"),
            *((repr(name), repr(name)) for name in NCCL_NAMES),
        ],
    )
    def test_what_it_asks_for_is_on_what_fits(self, run, call, shown):
        body = f"""
        dist.init_process_group({call})
        x = torch.tensor(rank)
        dist.all_reduce(x, group=dist.new_group())
        print(x.item())
        """
        status, out, err = run(body)
        assert (status, out) == (0, ["[rank 0] 1", "[rank 1] 1"])
        assert err == [f"dtorch run: the script asks for {shown}: 2 ranks on cpu use samedevice"]

    @pytest.mark.parametrize(
        ("asked", "called"),
        [
            ("gloo", "gloo"),
            ("GLOO", "gloo"),
            ("nccl", "gloo"),
            ("dtorch", "dtorch"),
            (None, "undefined"),
            ("cpu:gloo", "cpu:gloo"),
            ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"),
        ],
    )
    def test_a_group_is_called_what_it_stands_for(self, run, asked, called):
        """Libraries choose by that name: pytorch-ignite wraps a model in DDP for those that it knows."""
        body = f"""
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group({asked!r})
        named, pair, same = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:gloo"), dist.new_group()
        again = dist.new_group(backend=dist.get_backend())
        mesh = init_device_mesh("cpu", (2,)).get_group()
        print(*(dist.get_backend(group) for group in (None, dist.group.WORLD, same, again, mesh)))
        print(*(dist.get_backend(group) for group in (named, pair)))
        print(*(group.name() for group in (named, pair, same, again, mesh)))
        x = torch.tensor(rank)
        dist.all_reduce(x, group=again)
        print(x.item())
        """
        status, out, _ = run(body)
        assert status == 0
        texts = " ".join([called] * 5), "1", "gloo cpu:gloo", " ".join(["samedevice"] * 5)
        assert out == sorted(f"[rank {rank}] {text}" for rank in range(2) for text in texts)

    @pytest.mark.parametrize("asked", ["nccl", "gloo", "undefined", "cpu:gloo,cuda:nccl"])
    def test_on_a_gpu_a_group_is_called_what_was_asked_for(self, asked):
        assert script_groups._Script("dtorch", 2, "cuda:0").stands_for(asked) == asked

    def test_a_group_that_a_mesh_opens_has_no_name(self, run):
        body = """
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        print(dist.get_backend(), dist.get_backend(mesh.get_group()))
        """
        status, out, _ = run(body)
        assert (status, out) == (0, [f"[rank {rank}] undefined undefined" for rank in range(2)])

    def test_a_backend_of_torch_can_be_named_for_it(self, run):
        body = """
        dist.init_process_group("nccl")
        x = torch.tensor(rank)
        dist.all_reduce(x)
        print(dist.get_backend(), x.item())
        """
        status, out, err = run(body, "--nccl-as", "gloo")
        assert (status, out) == (0, ["[rank 0] gloo 1", "[rank 1] gloo 1"])
        assert err == ["dtorch run: the script asks for 'nccl': 2 ranks on cpu use gloo"]

    @pytest.mark.parametrize("option", ["--nproc", "--n"])  # its own option, and one that could be short for several
    def test_arguments_are_the_scripts(self, run, option):
        body = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--nproc", type=int)
        parser.add_argument("rest", nargs="*")
        folder, name = os.path.split(sys.argv[0])
        print(parser.parse_args(), name, os.path.isabs(__file__), sys.path[0] == os.path.dirname(__file__))
        """
        status, out, _ = run(body, arguments=(option, "7", "a", "b"))
        assert status == 0
        assert out == [f"[rank {rank}] Namespace(nproc=7, rest=['a', 'b']) script.py True True" for rank in range(2)]

    def test_variables_and_classes_are_each_ranks(self, run):
        body = """
        import pickle
        from dataclasses import dataclass

        dist.init_process_group("gloo")
        mine = rank

        @dataclass
        class Thing:
            value: "int"

        def answer():
            return mine

        dist.barrier()
        assert pickle.loads(pickle.dumps(Thing(rank))) == Thing(rank)
        import __main__
        from __main__ import mine as imported
        print(answer(), sys.modules["__main__"].mine, imported, __main__.Thing is Thing, vars(__main__)["mine"])
        """
        status, out, _ = run(body)
        assert (status, out) == (0, [f"[rank {rank}] {rank} {rank} {rank} True {rank}" for rank in range(2)])

    def test_the_environment_is_each_ranks(self, run, monkeypatch):
        monkeypatch.setenv("DTORCH_TEST_GIVEN", "given")
        body = """
        dist.init_process_group("gloo")
        os.environ["OWN"] = str(rank)
        if rank == 0:
            del os.environ["DTORCH_TEST_GIVEN"]

        dist.barrier()
        copied = os.environ.copy()
        given = os.environ.pop("DTORCH_TEST_GIVEN", None)
        assert "DTORCH_TEST_GIVEN" not in os.environ and len(os.environ) == len(list(os.environ))
        print(os.environ["OWN"], copied["OWN"], copied["RANK"], given, "HOME" in copied, os.getenv("NONE", "no"))
        try:
            os.environ["OWN"] = 3
        except TypeError as error:
            print(error)
        """
        home = "HOME" in os.environ
        status, out, _ = run(body)
        assert status == 0
        assert out == [
            f"[rank 0] 0 0 0 None {home} no", "[rank 0] str expected, not int",
            f"[rank 1] 1 1 1 given {home} no", "[rank 1] str expected, not int",
        ]  # fmt: skip

    def test_random_numbers_are_each_ranks(self, run):
        body = """
        dist.init_process_group("gloo")
        torch.manual_seed(rank)
        for _ in range(3):
            dist.barrier()
            print(torch.rand(1).item())
        """
        _, out, _ = run(body)
        expected = []
        for rank in range(2):
            torch.manual_seed(rank)
            expected += [f"[rank {rank}] {torch.rand(1).item()}" for _ in range(3)]

        assert out == sorted(expected)

    def test_a_group_can_be_opened_again(self, run):
        body = """
        for number in range(3):
            dist.init_process_group("gloo")
            x = torch.tensor(rank + number)
            dist.all_reduce(x)
            assert x == 2 * number + 1
            dist.destroy_process_group()
        """
        assert run(body)[0] == 0

    def test_a_store_of_its_own_works(self, run):
        body = """
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
        store.set(f"from {rank}", str(10 + rank))
        print(int(store.get(f"from {1 - rank}")))
        store.set(f"done {rank}", "")
        store.wait(["done 0", "done 1"])
        dist.init_process_group("gloo", store=dist.PrefixStore("x", store), rank=rank, world_size=world_size)
        dist.barrier()
        """
        assert run(body)[:2] == (0, ["[rank 0] 11", "[rank 1] 10"])

    def test_a_mesh_opens_the_default_group(self, run):
        body = """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (world_size,))
        print(distribute_tensor(torch.arange(6), mesh, [Shard(0)]).to_local().tolist(), os.environ["RANK"])
        """
        assert run(body)[:2] == (0, ["[rank 0] [0, 1, 2] 0", "[rank 1] [3, 4, 5] 1"])

    def test_a_module_can_be_run(self, tmp_path, capfd, monkeypatch):
        (tmp_path / "some_package").mkdir()
        (tmp_path / "some_package" / "__init__.py").touch()
        text = "from . import part\nprint(__name__, part.x, __spec__.name)"
        (tmp_path / "some_package" / "__main__.py").write_text(text)
        (tmp_path / "some_package" / "part.py").write_text("x = 3")
        monkeypatch.chdir(tmp_path)
        try:
            assert main(["run", "-m", "some_package"]) == 0
        finally:
            for name in [name for name in sys.modules if name.startswith("some_package")]:
                del sys.modules[name]

        lines = sorted(capfd.readouterr().out.splitlines())
        assert lines == [f"[rank {rank}] __main__ 3 some_package.__main__" for rank in range(2)]

    def test_ranks_may_be_processes(self, run):
        body = """
        dist.init_process_group("nccl")
        x = torch.arange(3) + 10 * rank
        dist.all_reduce(x)
        print(os.environ["LOCAL_RANK"], x.tolist(), len(sys.argv), __name__)
        sys.exit(rank * 3)
        """
        status, out, err = run(body, "--ranks-as", "processes", arguments=("one",))
        assert (status, out) == (3, ["[rank 0] 0 [10, 12, 14] 2 __main__", "[rank 1] 1 [10, 12, 14] 2 __main__"])
        assert "dtorch run: the script asks for 'nccl': 2 ranks on cpu use samedevice" in err
        assert err[-1] == "dtorch run: rank 1 of 2 ended with exit status 3"

    @pytest.mark.parametrize("kind", ["threads", "processes"])
    def test_threads_of_a_rank_belong_to_it(self, run, kind):
        body = """
            from concurrent.futures import ThreadPoolExecutor

            dist.init_process_group("gloo")

            def say():
                group = dist.new_group()
                x = torch.ones(2)
                dist.all_reduce(x, group=group)
                print("thread", os.environ["RANK"], dist.get_rank(), dist.get_backend(group), x.tolist())

            with ThreadPoolExecutor(1) as pool:
                pool.submit(say).result()

            thread = threading.Thread(target=dist.destroy_process_group)
            thread.start()
            thread.join()
            """
        status, out, _ = run(body, "--ranks-as", kind)
        assert status == 0
        assert out == [f"[rank {rank}] thread {rank} {rank} gloo [2.0, 2.0]" for rank in range(2)]

    def test_children_have_the_variables_of_ranks_that_are_processes(self, run):
        body = """
            import subprocess

            code = "import os; print(os.environ['RANK'], os.environ['MASTER_PORT'], os.environ['MINE'])"
            os.environ["MINE"] = str(rank)
            child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert child.stdout.split() == [str(rank), os.environ["MASTER_PORT"], str(rank)]
            """
        status, _, err = run(body, "--ranks-as", "processes")
        assert status == 0, err

    def test_ranks_may_start_processes(self, run):
        body = """
        from torch.utils.data import DataLoader

        if __name__ == "__main__":
            batches = [batch.tolist() for batch in DataLoader(range(rank, rank + 4), 2, num_workers=1)]
            print(batches)
        """
        assert run(body)[:2] == (0, ["[rank 0] [[0, 1], [2, 3]]", "[rank 1] [[1, 2], [3, 4]]"])

    def test_processes_of_a_rank_start_as_the_callers_do(self, run):
        body = """
        import multiprocessing
        print(multiprocessing.get_start_method(allow_none=True))
        """
        method = multiprocessing.get_start_method(allow_none=True)
        assert run(body, "--ranks-as", "processes", nproc=1)[:2] == (0, [f"[rank 0] {method}"])
