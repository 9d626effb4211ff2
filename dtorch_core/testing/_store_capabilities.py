"""What a backend says about itself: its probe and its capabilities have to agree."""

from __future__ import annotations

import pytest

from dtorch_core._selection.reasons import Support
from dtorch_core._selection.selector import select
from dtorch_core._selection.topology import Topology, imagine
from dtorch_core.errors import NoBackendError, UnsupportedOperationError
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import installed_spec, undeclared
from dtorch_core.testing._store_base import StoreConformance, coded, take

PLACES: dict[str, list[Topology]] = {
    "cpu": [imagine(2), imagine(2, "processes")],
    "cuda": [imagine(2, "threads", ["cuda:0"]), imagine(2, "processes", ["cuda:0"])],
    "multi_process": [imagine(3, "processes"), imagine(4, "processes", per_process=2)],
    "multi_host": [imagine(4, "processes", hosts=2), imagine(2, "processes", hosts=2)],
}
"""For each capability, where ranks can be that need it."""


class CapabilityTests(StoreConformance):
    """A probe answers for imagined ranks, so no such machine is needed."""

    def test_backend_declares_what_it_carries(self) -> None:
        assert self.declared & {"cpu", "cuda"}, "declare 'cpu', 'cuda' or both"

    # Not "cuda" alone: that is the name of a test that needs a CUDA device, and shows that the backend holds the word.
    @pytest.mark.parametrize("word", PLACES, ids="imagined {} ranks".format)
    def test_probe_says_yes_only_to_what_is_declared(self, word: str) -> None:
        probe = installed_spec("store", self.backend).probe
        answers = [probe(topology) for topology in PLACES[word]]
        for topology, answer in zip(PLACES[word], answers, strict=True):
            assert isinstance(answer, Support)
            assert answer.why.strip()
            assert word in self.declared or not answer.ok, f"yes to {topology}, though {word!r} is not declared"
            assert answer == probe(topology), "the same ranks, another answer"

        assert word not in self.declared or any(answer.ok for answer in answers), f"{word!r} is declared: {answers}"

    def test_probe_says_no_to_different_devices_unless_declared(self) -> None:
        answer = installed_spec("store", self.backend).probe(imagine(2, "threads", ["cpu", "cuda:0"]))
        assert answer.ok <= ({"cpu", "cuda", "cross_device"} <= self.declared)

    def test_backend_that_does_not_fit_refuses_with_its_own_reason(self) -> None:
        """Named for ranks that it can't serve, it raises; it is not replaced by another one."""
        far = imagine(4, "processes", hosts=2)
        answer = installed_spec("store", self.backend).probe(far)
        if answer.ok:
            assert "multi_host" in self.declared
            return

        with pytest.raises(NoBackendError) as caught:
            select("store", far, backend=self.backend)

        assert answer.why in str(caught.value)

    def test_backend_is_chosen_by_name(self) -> None:
        def rank(ctx: RankContext) -> str:
            with ctx.open_store("kit", backend=self.backend, timeout=self.patience / 2) as store:
                assert store.selection.asked_by == "argument"
                return store.backend

        assert self.raw_ranks(rank, 2) == [self.backend] * 2

    @undeclared("cross_device")
    def test_other_device_is_refused_where_it_is_not_declared(self) -> None:
        def body(store: TensorStore) -> None:
            other = "cuda:0" if self.home == "cpu" else "cpu"
            with pytest.raises(UnsupportedOperationError):
                store.src_set("k", coded(0, device=self.home), 1, dest_device=other)

            store.src_set("k", coded(0, device=self.home), 1, dest_device=self.home)
            take(store, "k", coded(0, device=self.home))

        self.ranks(body, 1)

    def test_hint_of_the_tensors_own_device_changes_nothing(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            store.src_set("k", coded(0, device=device), 1, dest_device=device)
            take(store, "k", coded(0, device=device))
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1, device)
