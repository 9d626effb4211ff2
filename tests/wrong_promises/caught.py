"""Which test of the kit catches which mistake."""

from __future__ import annotations

from .awaiting import (
    AwaitBlocksTheLoop,
    AwaitIsNotShielded,
    AwaitIsNotWokenFromOutside,
    AwaitLeavesItsWaiter,
    AwaitMindsAClosedLoop,
    AwaitPolls,
    AwaitReportsWhatWasLeft,
    AwaitSpins,
    AwaitTakesAThread,
)
from .base import Right
from .ending import (
    BreaksSilently,
    FailsTheWorkerOfACancelledFuture,
    IgnoresCancel,
    IsNeverBroken,
    KeepsItself,
    TellsNoStandardWait,
)
from .handing_over import DropsWhatItHandedOver
from .once import GivesManyFutures, SetsAgain, SetsWithoutALock
from .values import (
    BringsOnce,
    BringsTheLatest,
    ChangesWhatItIsGiven,
    CutsLargeValues,
    FlattensViews,
    GivesTheSameTensor,
    GrowsTracebacks,
    HidesTypes,
    KeepsTheGradient,
    SwallowsErrors,
    TakesAnything,
)
from .waiting import ForgetsTheRun, ForgetsToWake, LosesWhatIsLate, RaisesAnotherTimeout

CAUGHT_BY: dict[type[Right], str] = {
    SwallowsErrors: "test_error_keeps_its_type",
    HidesTypes: "test_error_keeps_its_type",
    GivesTheSameTensor: "test_result_is_each_callers_own_object",
    ChangesWhatItIsGiven: "test_requires_grad_arrives_detached",
    CutsLargeValues: "test_large_value_arrives_whole",
    FlattensViews: "test_layout_arrives_with_its_values",
    KeepsTheGradient: "test_requires_grad_arrives_detached",
    TakesAnything: "test_unsupported_value_is_refused_in_the_caller",
    BringsTheLatest: "test_many_promises_do_not_mix",
    BringsOnce: "test_result_again_is_the_same_value",
    GrowsTracebacks: "test_error_raised_often_does_not_grow",
    SetsAgain: "test_second_set_is_refused",
    SetsWithoutALock: "test_set_by_many_threads_is_of_one",
    GivesManyFutures: "test_future_is_given_once",
    LosesWhatIsLate: "test_timeout_can_be_repeated",
    ForgetsToWake: "test_value_wakes_a_consumer_that_waits",
    RaisesAnotherTimeout: "test_timeout_can_be_repeated",
    ForgetsTheRun: "test_failure_of_another_rank_ends_the_wait",
    IsNeverBroken: "test_dropped_promise_breaks_its_future",
    BreaksSilently: "test_dropped_promise_breaks_its_future",
    KeepsItself: "test_dropped_promise_breaks_its_future",
    IgnoresCancel: "test_cancel_ends_the_future_and_tells_the_promise",
    FailsTheWorkerOfACancelledFuture: "test_cancel_ends_the_future_and_tells_the_promise",
    TellsNoStandardWait: "test_concurrent_wait_sees_every_end",
    DropsWhatItHandedOver: "test_hand_over_and_drop_changes_nothing",
    AwaitPolls: "test_await_does_not_poll",
    AwaitSpins: "test_await_does_not_poll",
    AwaitTakesAThread: "test_await_does_not_poll",
    AwaitBlocksTheLoop: "test_await_leaves_the_loop_to_others",
    AwaitIsNotShielded: "test_await_that_is_given_up_loses_nothing",
    AwaitReportsWhatWasLeft: "test_await_that_was_left_reports_nothing",
    AwaitIsNotWokenFromOutside: "test_await_gives_the_value",
    AwaitLeavesItsWaiter: "test_await_that_is_given_up_leaves_nothing",
    AwaitMindsAClosedLoop: "test_await_in_a_loop_that_was_closed",
}
"""Each mistake and the test that has to fail of it."""
