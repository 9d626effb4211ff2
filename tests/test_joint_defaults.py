"""What TensorStore makes of the four steps conforms: joint work, messages, and so a samedevice group over any store."""

from pathlib import Path

import pytest

from dtorch_core import use_backend
from dtorch_core.testing import DEVICES, run_kit

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import four_steps

registered = four_steps.registered


class TestGroupOverFourSteps:
    """What the kit asks of a group, over a store with the defaults: the tests that a store can make fail."""

    TESTS = f"""
        test_collective_of_odd_and_empty_shapes[{DEVICES[0]}-1] test_collective_of_odd_and_empty_shapes[{DEVICES[0]}-3]
        test_collective_of_large_tensors[{DEVICES[0]}-2] test_collective_of_any_layout test_result_shares_no_memory
        test_result_is_of_its_own_ranks_inference_mode test_out_may_be_the_input test_out_of_all_to_all_may_be_the_input
        test_many_in_flight_are_waited_for_in_any_order test_large_and_small_in_flight
        test_work_that_is_dropped_ends_all_the_same test_work_may_be_waited_for_by_several_threads
        test_future_can_be_followed test_work_of_a_mismatch_raises test_work_that_is_late_raises_at_its_deadline
        test_mismatch_among_many_in_flight test_mismatch_of_every_rank_with_every_other
        test_message_is_a_copy test_messages_arrive_in_order test_receive_can_be_retried_after_a_timeout
        test_receive_that_waits_in_the_background test_receive_from_a_rank_that_left
        test_receiving_from_anybody_is_refused test_timeout_is_each_ranks_own
        test_timeout_names_who_has_not_come_and_who_gave_up[all_reduce]
        test_timeout_names_who_has_not_come_and_who_gave_up[all_gather]
        test_abort_wakes_every_rank_now_and_later[all_reduce] test_abort_wakes_every_rank_now_and_later[all_gather]
        test_close_wakes_ones_own_wait test_close_is_a_goodbye test_failure_ends_futures_and_callbacks
        test_rank_that_fails_ends_the_run_at_once[all_to_all]
    """.split()

    def test_group_conforms(self):
        with use_backend(store="four steps"):
            outcomes = run_kit("group", "over four steps", select=self.TESTS)

        failed = [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"]
        assert not failed, "\n".join(failed)
        ran = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "passed"}
        assert ran == {test.partition("[")[0] for test in self.TESTS}


class TestStoreOverFourSteps:
    def test_store_conforms(self):
        """What the kit asks of joint work and messages, whoever makes them."""
        outcomes = run_kit("store", "four steps", expression="post or message")
        failed = [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"]
        assert not failed, "\n".join(failed)
        assert len([outcome for outcome in outcomes if outcome.state == "passed"]) >= 20
