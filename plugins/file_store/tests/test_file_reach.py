"""Whether ranks can map each other's CUDA memory, as they tell each other when they meet."""

import pytest
from dtorch_file_store import reach
from dtorch_file_store.cuda.driver import DriverError

from dtorch_core import Member

ONE, OTHER = "1" * 32, "2" * 32


def member(rank, **facts):
    return Member(rank, "host", 100 + rank, rank, "cuda:0", None, facts)


def able(rank, *seen, home=ONE):
    return member(rank, **{reach.REASON: "", reach.SEEN: ",".join(seen), reach.HOME: home})


class TestWhyHost:
    def test_all_can(self):
        assert reach.why_host([able(0, ONE, OTHER), able(1, OTHER, ONE)], [ONE, OTHER]) is None

    def test_rank_that_does_not_see_a_device_is_named(self):
        said = reach.why_host([able(0, ONE, OTHER), able(1, ONE)], [ONE, OTHER])
        assert said == f"rank 1: it does not see the device {OTHER} (CUDA_VISIBLE_DEVICES)"

    def test_rank_that_can_not_is_named_also_to_itself(self):
        ranks = [able(0, ONE), member(1, **{reach.REASON: "no driver", reach.SEEN: "", reach.HOME: ""})]
        assert reach.why_host(ranks, [ONE]) == "rank 1: no driver"

    def test_rank_on_the_cpu_is_named(self):
        assert reach.why_host([able(0, ONE), member(1)], [ONE]) == "rank 1: it is not on a CUDA device"


class TestFacts:
    def test_variable_forbids_it(self, monkeypatch):
        monkeypatch.setenv(reach.VARIABLE, "0")
        ranks = [able(0, ONE), member(1, **reach.facts("cuda:0"))]
        assert reach.why_host(ranks, [ONE]) == f"rank 1: {reach.VARIABLE}=0 forbids it"

    @pytest.mark.parametrize("said", ["", "1"])
    def test_without_a_driver_the_reason_is_told(self, monkeypatch, said):
        def driver():
            raise DriverError("no driver here")

        monkeypatch.setenv(reach.VARIABLE, said)
        monkeypatch.setattr(reach, "driver", driver)
        assert reach.facts("cuda:0")[reach.REASON] == "no driver here"
