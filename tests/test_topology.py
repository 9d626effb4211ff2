"""Topologies answer where ranks are; imagined ones are what real ones would be."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from dtorch_core import Member, Selection, Topology, Verdict
from dtorch_core._selection.topology import imagine
from dtorch_core._text import rank_list


def member(rank, host="host 0", pid=1, device="cpu", uuid="", **facts):
    return Member(rank, host, pid, rank, device, uuid, facts)


class TestMember:
    def test_facts_are_read_only_and_its_own(self):
        facts = {"memory.pages": "huge"}
        one = Member(0, "host", 1, 1, "cpu", facts=facts)
        facts["memory.pages"] = "changed"
        assert one.facts == {"memory.pages": "huge"}
        with pytest.raises(TypeError):
            one.facts["x"] = "y"

    def test_is_the_same_after_json_and_after_pickle(self):
        one = member(1, device="cuda:1", uuid="GPU-1", a="b")
        assert Member.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        assert pickle.loads(pickle.dumps(one)) == one
        assert copy.deepcopy(one) == one

    def test_device_type(self):
        assert member(0).device_type == "cpu"
        assert member(0, device="cuda:1").device_type == "cuda"

    def test_one_gpu_under_two_ordinals_is_one_device(self):
        one = member(0, pid=1, device="cuda:0", uuid="GPU-7")
        two = member(1, pid=2, device="cuda:1", uuid="GPU-7")
        assert Topology([one, two]).same_device

    def test_one_ordinal_of_two_gpus_is_two_devices(self):
        one = member(0, pid=1, device="cuda:0", uuid="GPU-7")
        two = member(1, pid=2, device="cuda:0", uuid="GPU-8")
        assert Topology([one, two]).distinct_devices


class TestTopology:
    def test_is_in_rank_order(self):
        assert [m.rank for m in Topology([member(2), member(0), member(1)])] == [0, 1, 2]

    @pytest.mark.parametrize("ranks", [[], [0, 0], [0, 2], [1, 2]])
    def test_needs_each_rank_once(self, ranks):
        with pytest.raises(ValueError):
            Topology(member(rank) for rank in ranks)

    def test_groups_members_in_rank_order(self):
        mixed = imagine(4, "processes", ("cuda:0", "cuda:0", "cuda:1", "cuda:1"), per_process=2)
        assert [[m.rank for m in group] for group in mixed.by_process().values()] == [[0, 1], [2, 3]]
        assert [[m.rank for m in group] for group in mixed.by_device().values()] == [[0, 1], [2, 3]]

    def test_selection_is_the_same_after_pickle(self):
        verdict = Verdict("memory", "dtorch-memory-store", "0.1.0", "yes", 100, "threads")
        selection = Selection("store", imagine(3, devices=("cuda:0",)), "memory", "score", (verdict,))
        again = pickle.loads(pickle.dumps(selection))
        assert again == selection
        assert str(again) == str(selection)
        assert isinstance(again.topology, Topology)

    def test_json_says_what_the_selector_sees(self):
        fields = json.loads(json.dumps(imagine(2, "processes").to_dict()))
        assert fields["same_host"] and fields["same_device"]
        assert not fields["same_process"] and not fields["distinct_devices"]
        assert [m["rank"] for m in fields["members"]] == [0, 1]

    def test_many_ranks_are_named_in_part(self):
        assert rank_list([]) == "no rank"
        assert rank_list([2, 0]) == "rank 0, rank 2"
        named = ", ".join(f"rank {rank}" for rank in range(14))
        assert rank_list(range(16)) == f"{named}, rank 14, rank 15"
        assert rank_list(range(17)) == f"{named}, 2 more, rank 16"
        assert rank_list(reversed(range(1000))) == f"{named}, 985 more, rank 999"


class TestImagine:
    @pytest.mark.parametrize(
        ("arguments", "same_process", "same_host", "same_device", "distinct", "device_type", "summary"),
        [
            ((1,), True, True, True, True, "cpu", "1 rank, in this process, on cpu"),
            ((4,), True, True, True, False, "cpu", "4 ranks, threads of one process, sharing cpu"),
            ((4, "processes"), False, True, True, False, "cpu", "4 ranks, processes of one host, sharing cpu"),
            ((3, "threads", ("cuda:0",)), True, True, True, False, "cuda", "threads of one process, sharing cuda:0"),
            (
                (2, "threads", ("cuda:0", "cuda:1")),
                True, True, False, True, "cuda",
                "2 ranks, threads of one process, each its own device",
            ),
            (
                (2, "processes", ("cpu", "cuda:1")),
                False, True, False, True, "mixed",
                "2 ranks, processes of one host, each its own device",
            ),
            (
                (3, "threads", ("cuda:0", "cuda:0", "cuda:1")),
                True, True, False, False, "cuda",
                "on 2 devices: cuda:0 = rank 0, rank 1; cuda:1 = rank 2",
            ),
            ((4, "processes", ("cuda:0",), 4), False, False, False, True, "cuda", "processes on 4 hosts"),
            ((4, "threads", ("cpu",), 2), False, False, False, False, "cpu", "threads of 2 processes on 2 hosts"),
            ((4, "processes", ("cpu",), 1, 2), False, True, True, False, "cpu", "threads of 2 processes on 1 host"),
        ],
    )  # fmt: skip
    def test_answers(self, arguments, same_process, same_host, same_device, distinct, device_type, summary):
        topology = imagine(*arguments)
        assert topology.same_process == same_process
        assert topology.same_host == same_host
        assert topology.same_device == same_device
        assert topology.distinct_devices == distinct
        assert topology.device_type == device_type
        assert summary in topology.summary()

    @pytest.mark.parametrize(
        "arguments",
        [
            (0,),
            (2, "threads", ("cpu",), 3),
            (2, "threads", ("cpu",), 0),
            (2, "fibres"),
            (2, "processes", ("cpu",), 1, 0),
            (3, "threads", ("cpu", "cpu")),
        ],
    )
    def test_refuses_what_does_not_fit(self, arguments):
        with pytest.raises(ValueError):
            imagine(*arguments)
