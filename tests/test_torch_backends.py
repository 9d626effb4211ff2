"""Names of group backends in torch.distributed: when they are registered, and what of torch is asked differently."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from datetime import timedelta
from importlib import metadata

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtorch_core import NoBackendError, torch_backends, use_backend
from dtorch_core._groups import torch_state
from dtorch_core._thread_ranks.when_imported import when_imported

GROUP = "torch.distributed.backends"
"""Where torch 2.14 looks for backends."""

NAMES = {"samedevice", "dtorch"}


def told_by(code):
    """What a fresh Python prints as JSON after ``code``."""
    program = f"import json, sys, warnings; warnings.simplefilter('ignore')\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class TestRegistration:
    def test_plugin_registers_before_torch_and_imports_none(self):
        told = told_by(
            "import dtorch_samedevice_group\n"
            "before = 'torch' in sys.modules\n"
            "finders = len(sys.meta_path)\n"
            "import torch.distributed as dist\n"
            "print(json.dumps([before, finders - len(sys.meta_path), dist.Backend.backend_list]))"
        )
        assert told[:2] == [False, 1]  # what waited for torch is gone
        assert NAMES <= set(told[2])

    def test_plugin_registers_after_torch(self):
        told = told_by(
            "import torch.distributed as dist\n"
            "before = list(dist.Backend.backend_list)\n"
            "import dtorch_samedevice_group\n"
            "print(json.dumps([before, dist.Backend.backend_list, dist.Backend.default_device_backend_map]))"
        )
        assert not NAMES & set(told[0]) and NAMES <= set(told[1])
        assert (told[2]["cpu"], told[2]["cuda"]) == ("gloo", "nccl")  # what a program gets that names none

    @pytest.mark.parametrize("name", sorted(NAMES))
    def test_entry_point_registers(self, name):
        told = told_by(
            "import torch.distributed as dist\n"
            "from importlib.metadata import entry_points\n"
            f"point, = entry_points(group={GROUP!r}, name={name!r})\n"
            "point.load()()\n"
            f"print(json.dumps([dist.is_backend_available({name!r}), dist.Backend.backend_capability[{name!r}]]))"
        )
        assert told == [True, ["cpu", "cuda"]]

    def test_import_of_torch_needs_nothing_of_it(self):
        points = metadata.entry_points(group="torch.backends")
        assert not [point for point in points if point.value.startswith("dtorch")]

    def test_registering_again_changes_nothing(self):
        torch_backends.register("samedevice")
        before = dict(dist.Backend._plugins)
        torch_backends.register("samedevice")
        assert dist.Backend._plugins == before


class TestSelection:
    @pytest.fixture(autouse=True)
    def registered(self):
        torch_backends.register("samedevice")
        yield
        if dist.is_initialized():
            dist.destroy_process_group()

    @pytest.mark.parametrize("name", sorted(NAMES))
    def test_one_rank_is_samedevice(self, name):
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == name and dist.group.WORLD.name() == "samedevice"

    def test_dtorch_asks_the_authorities(self):
        with use_backend(group="somewhere"), pytest.raises(NoBackendError, match="'somewhere'.*use_backend"):
            dist.init_process_group("dtorch", store=dist.HashStore(), rank=0, world_size=1)

        assert not dist.is_initialized()

    def test_samedevice_is_asked_for_by_name(self):
        with use_backend(group="somewhere"):
            dist.init_process_group("samedevice", store=dist.HashStore(), rank=0, world_size=1)

        assert dist.group.WORLD.name() == "samedevice"

    def test_timeout_is_the_groups(self):
        dist.init_process_group(
            "samedevice", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7)
        )
        assert dist.group.WORLD._timeout == 7


class TestTorchsOwnFunctions:
    @pytest.fixture
    def gloo(self):
        torch_backends.register("samedevice")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.usefixtures("gloo")
    def test_other_groups_are_as_before(self):
        dist.monitored_barrier(timeout=timedelta(seconds=5))
        set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # its name up to torch 2.13
        set_timeout(timedelta(seconds=5))
        try:
            part = dist.split_group(split_ranks=[[0]])
        except RuntimeError as error:
            assert "No device associated with the default pg" in str(error)  # up to torch 2.14
        else:
            assert isinstance(part._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)  # torch 2.15 splits Gloo's

    @pytest.mark.usefixtures("gloo")
    def test_a_group_of_ours_beside_gloo(self):
        ours = dist.new_group(backend="samedevice")
        dist.monitored_barrier(ours, timedelta(seconds=5))
        assert dist.get_backend(dist.split_group(ours, [[0]])) == "samedevice"

    def test_wrong_arguments_are_refused_as_before(self):
        with pytest.raises(TypeError, match="monitored_barrier"):
            dist.monitored_barrier(patience=3)

    def test_what_torch_lacks_is_remembered(self, monkeypatch):
        monkeypatch.setattr(torch_state, "missed", [])
        torch_state._ask_the_group("no_such_function", "group", lambda group: None)
        assert "no_such_function" in torch_state.missed[0]

        monkeypatch.setattr(c10d, "one_that_changed", lambda pg: None, raising=False)
        torch_state._ask_the_group("one_that_changed", "group", lambda group, timeout: None)
        assert "one_that_changed takes (pg)" in torch_state.missed[1]

    def test_this_torch_lacks_nothing(self):
        assert torch_state.missed == []


class TestWhenImported:
    def test_module_that_is_there(self):
        done = []
        when_imported("json", lambda: done.append(1))
        assert done == [1]

    def test_module_that_comes(self, site):
        name, done = site.module("there = True"), []
        when_imported(name, lambda: done.append(sys.modules[name].there))
        when_imported(name, lambda: done.append("second"))
        assert done == []
        module = __import__(name)
        assert isinstance(module, types.ModuleType) and done == [True, "second"]

    def test_module_that_does_not_exist(self):
        done = []
        when_imported("no_such_module_at_all", lambda: done.append(1))
        with pytest.raises(ModuleNotFoundError):
            __import__("no_such_module_at_all")

        assert done == []

    def test_module_that_fails_first(self, site):
        name, done = site.module("raise ValueError('not yet')"), []
        when_imported(name, lambda: done.append(1))
        with pytest.raises(ValueError, match="not yet"):
            __import__(name)

        (site.folder / f"{name}.py").write_text("there = 'now, and longer'")
        __import__(name)
        assert done == [1]
