"""What the plugin says without a GPU, and without torch where none is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist
from dtorch_nccl_group import hooks, torch_nccl
from dtorch_nccl_group.environment import Environment

from dtorch_core import Member, Topology, explain
from dtorch_core.cli import main


def member(rank, device, uuid="", host="here", facts=None):
    return Member(rank, host, 100 + rank, rank, device, uuid, {hooks.VERSION: "2.28.9"} if facts is None else facts)


class TestProbe:
    @pytest.mark.parametrize(
        ("members", "ok", "why"),
        [
            ([member(0, "cuda:0", "GPU-a"), member(1, "cuda:1", "GPU-b")], True, "a GPU of its own"),
            ([member(0, "cuda:0", "GPU-a")], True, "a GPU of its own"),
            ([member(0, "cuda:0", "GPU-a", "one"), member(1, "cuda:0", "GPU-b", "two")], True, "a GPU of its own"),
            (
                [member(0, "cuda:0", "GPU-a"), member(1, "cuda:0", "GPU-a")],
                False,
                r"^rank 0 and rank 1 share cuda:0 \(GPU-a\): NCCL refuses that; samedevice is for it$",
            ),
            (
                [member(0, "cuda:0", "GPU-b"), member(1, "cuda:1", "GPU-a"), member(2, "cuda:0", "GPU-a")],
                False,
                r"^rank 1 and rank 2 share cuda:1 \(GPU-a\)",
            ),
            ([member(0, "cpu", facts={}), member(1, "cpu", facts={})], False, "^rank 0, rank 1 on the CPU"),
            ([member(0, "cuda:0", "GPU-a"), member(1, "cpu", facts={})], False, "^rank 1 on the CPU"),
            (
                [member(0, "cuda:0", "GPU-a", facts={hooks.VERSION: ""}), member(1, "cuda:1", "GPU-b")],
                False,
                "^the torch of rank 0 is built without NCCL$",
            ),
            (
                [member(0, "cuda:0", "GPU-a"), member(1, "cuda:1", "GPU-b", facts={hooks.VERSION: "2.30.7"})],
                False,
                r"2.28.9 \(rank 0\), 2.30.7 \(rank 1\); install one for all",
            ),
        ],
    )
    def test_says_who_has_what(self, members, ok, why):
        support = hooks.probe(Topology(members))
        assert support.ok is ok
        assert support.why
        assert re.search(why, support.why), support.why

    def test_selection_is_by_topology(self):
        each = Topology([member(0, "cuda:0", "GPU-a"), member(1, "cuda:1", "GPU-b")])
        shared = Topology([member(0, "cuda:0", "GPU-a"), member(1, "cuda:0", "GPU-a")])
        assert explain("group", each).chosen == "nccl"
        assert explain("group", shared).verdict("nccl").state == "no"

    def test_command_explains_it(self, capsys):
        assert main(["explain", "--kind", "group", "--ranks", "2", "--devices", "cuda:0,cuda:1"]) == 0
        out = capsys.readouterr().out
        assert "nccl (decided by score)" in out
        assert "every rank has a GPU of its own: collectives go over NCCL" in out
        main(["explain", "--kind", "group", "--ranks", "2", "--device", "cuda:0"])
        assert "rank 0 and rank 1 share cuda:0" in capsys.readouterr().out


class TestFacts:
    def test_rank_on_the_cpu_needs_none(self):
        assert hooks.dtorch_describe_member(member(0, "cpu")) == {}

    def test_rank_with_a_gpu_tells_its_version(self):
        found = hooks.dtorch_describe_member(member(0, "cuda:0", "GPU-a"))
        assert found == {hooks.VERSION: torch_nccl.version()}

    def test_hooks_bring_no_torch(self):
        code = (
            "import sys, dtorch_nccl_group, dtorch_nccl_group.hooks as h\n"
            "from dtorch_core import Member\n"
            "h.dtorch_describe_member(Member(0, 'h', 1, 1, 'cpu')); h.dtorch_register_thread_groups()\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


class TestSettings:
    def test_only_what_the_user_has_not_set_is_added_while_something_is_there(self, monkeypatch):
        monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
        monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
        environment, before = Environment(torch_nccl.SETTINGS), dict(os.environ)
        groups = [environment.made(lambda: dist.ProcessGroupGloo(dist.HashStore(), 0, 1)) for _ in range(2)]
        during = dict(os.environ)
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in during
        assert during["TORCH_NCCL_ENABLE_MONITORING"] == "0"
        groups.pop()
        assert dict(os.environ) == during, "other threads may read it"
        with pytest.raises(ZeroDivisionError):
            environment.made(lambda: 1 // 0)

        assert dict(os.environ) == during
        groups.pop()
        assert dict(os.environ) == before

    def test_what_the_user_sets_meanwhile_stays(self, monkeypatch):
        monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
        group = Environment(torch_nccl.SETTINGS).made(lambda: dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
        monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
        del group
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"

    def test_what_is_read_once_is_set_with_the_first(self, monkeypatch):
        names = [name for names in torch_nccl.WITHOUT_RECORDER for name in names]
        for name in names:
            monkeypatch.delenv(name, raising=False)

        def made(environment):
            return environment.made(lambda: dist.ProcessGroupGloo(dist.HashStore(), 0, 1), torch_nccl.WITHOUT_RECORDER)

        environment, before = Environment(torch_nccl.SETTINGS), dict(os.environ)
        group = made(environment)
        assert os.environ[names[0]] == "0"
        del group
        assert dict(os.environ) == before
        first = environment.made(lambda: dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
        second = made(environment)
        assert names[0] not in os.environ, "it has been read, and other threads may read the environment"
        del first, second
        monkeypatch.setenv(names[1], "5")
        group = made(environment)
        assert names[0] not in os.environ, "the user has set it by its other name"
        del group
