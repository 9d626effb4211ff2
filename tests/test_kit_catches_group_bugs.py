"""The group kit is itself tested: each wrong group here has one bug, and the test that should catch it does."""

import threading
import time

import pytest
import torch
from dtorch_samedevice_group.group import SameDeviceProcessGroup
from dtorch_samedevice_group.work import GroupWork, seconds_of

import dtorch_core
from dtorch_core import AbortedError, BackendSpec, CollectiveMismatchError, StoreTimeoutError, Support, hookimpl
from dtorch_core.joint import Offer
from dtorch_core.testing import DEVICES, run_kit

ALL = frozenset("cpu cuda uneven bitwise_ops p2p any_source tags self_send split mismatch rank_order async".split())

PATIENCE = 1.0
"""Seconds for tests that are to fail; the right group gets all the time it may need."""

WRONG = []


def same_device(topology):
    return Support.yes(1, "one device") if topology.same_device else Support.no("several devices")


def wrong(test):
    """Mark a wrong group with the kit's test that has to catch it; ``DEVICE`` in it is the first one tested on."""

    def mark(group):
        group.caught_by = test.replace("DEVICE", DEVICES[0])
        WRONG.append(group)
        return group

    return mark


class Around(SameDeviceProcessGroup):
    """For groups that do something around every collective; ``around`` is given its c10d name."""

    def around(self, name, call):
        return call()


def _around(name):
    def method(self, *args, **named):
        return self.around(name, lambda: getattr(super(Around, self), name)(*args, **named))

    return method


for _name, _method in vars(SameDeviceProcessGroup).items():
    if hasattr(_method, "__wrapped__"):
        setattr(Around, _name, _around(_name))


class Works(Around):
    """For groups whose collectives are right, and whose Works are not."""

    work = GroupWork

    def around(self, name, call):
        right = call()
        return self.work(right._ticket, right._outputs, right._timeout)


class EndsWork(GroupWork):
    """All of it goes through ``_end``."""

    def wait(self, timeout=None):
        self._end(seconds_of(timeout, self._timeout))
        return True


class Changes(Around):
    """For groups that do something else to the tensors: ``changed`` stands around the work."""

    def __init__(self, ctx):
        super().__init__(ctx)
        self._calling = threading.local()
        self._post, self._engine.post = self._engine.post, self._changed_post

    def around(self, name, call):
        self._calling.name = name
        return call()

    def changed(self, name, work, offers):
        return work(offers)

    def _changed_post(self, note, tensors, collective, *stream):
        name = getattr(self._calling, "name", "")

        def work(offers):
            for task in self.changed(name, collective.work, offers):
                task()

            return ()

        return self._post(note, tensors, collective._replace(work=work), *stream)


# Values


@wrong("test_collective_of_even_shapes[DEVICE-3]")
class LosesTheLastRanksPart(Changes):
    def changed(self, name, work, offers):
        return work([*offers[:-1], offers[0]._replace(rank=offers[-1].rank)]) if name == "allreduce" else work(offers)


@wrong("test_collective_of_even_shapes[DEVICE-3]")
class ChangesItsInput(Changes):
    def changed(self, name, work, offers):
        tasks = work(offers)
        return [*tasks, lambda: offers[0].tensors[1].add_(1)] if name == "reduce_scatter" else tasks


@wrong("test_collective_of_even_shapes[DEVICE-8]")
class MixesUpTwoRanks(Changes):
    def changed(self, name, work, offers):
        if name == "allgather" and len(offers) > 3:
            inputs = [offer.tensors[-1] for offer in offers]
            inputs[2], inputs[3] = inputs[3], inputs[2]
            offers = [Offer(o.rank, o.note, (*o.tensors[:-1], x)) for o, x in zip(offers, inputs, strict=True)]

        return work(offers)


@wrong("test_collective_of_large_tensors[DEVICE-2]")
class LosesTheLastBlock(Changes):
    def changed(self, name, work, offers):
        if name != "allreduce" or offers[0].tensors[0].numel() < 1_000_000:
            return work(offers)

        whole = [offer.tensors[0] for offer in offers]
        return work([Offer(o.rank, o.note, (x[:-1],)) for o, x in zip(offers, whole, strict=True)])


@wrong("test_collective_of_any_layout[DEVICE-transposed]")
class TakesMemoryForContiguous(Changes):
    def changed(self, name, work, offers):
        def flat(tensor):
            return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())

        if name == "allgather":
            offers = [Offer(o.rank, o.note, tuple(map(flat, o.tensors))) for o in offers]

        return work(offers)


@wrong("test_collective_of_0_dim_tensors[DEVICE-2]")
class RefusesScalars(SameDeviceProcessGroup):
    def broadcast(self, tensors, *opts):
        assert tensors[0].dim() > 0
        return super().broadcast(tensors, *opts)


@wrong("test_collective_of_odd_and_empty_shapes[DEVICE-3]")
class SkipsWhatIsEmptySomewhere(Changes):
    def changed(self, name, work, offers):
        return () if any(t.numel() == 0 for o in offers for t in o.tensors) and name == "alltoall" else work(offers)


@wrong("test_all_gather_of_shards_that_differ")
class ExpectsShardsOfOneSize(Changes):
    def changed(self, name, work, offers):
        if name == "allgather" and len({offer.tensors[-1].shape for offer in offers}) > 1:
            return [lambda: offers[-1].tensors[0].zero_()]

        return work(offers)


@wrong("test_dtype_arrives_bit_for_bit[DEVICE-float32]")
class SendsNumbersNotBits(Changes):
    def changed(self, name, work, offers):
        tasks = work(offers)
        if name != "broadcast" or not offers[0].tensors[0].is_floating_point():
            return tasks

        return [*tasks, *(lambda o=o: o.tensors[0].copy_(o.tensors[0].float() + 1 - 1) for o in offers)]


@wrong("test_result_shares_no_memory[all_reduce]")
class HandsOutOneResult(SameDeviceProcessGroup):
    results = {}

    def allreduce(self, tensors, *opts):
        work = super().allreduce(tensors, *opts)
        work.wait()
        tensors[0].set_(self.results.setdefault((id(self._store._session), self._number()), tensors[0]))
        return work

    def _number(self):
        self.count = getattr(self, "count", 0) + 1
        return self.count


# Reductions


class Reduces(Changes):
    """Its own all_reduce: the first offer's tensor becomes ``total``, the others' too."""

    def changed(self, name, work, offers):
        if name != "allreduce":
            return work(offers)

        total = self.total([offer.tensors[0].clone() for offer in offers], offers[0].note)
        return [lambda o=o: o.tensors[0].copy_(total) for o in offers]


@wrong("test_reduction_of_whole_numbers_is_exact_and_wraps[DEVICE-2]")
class SumsWhateverIsAsked(Reduces):
    def total(self, inputs, call):
        return sum(x.to(torch.int64) if not x.is_floating_point() else x for x in inputs)


@wrong("test_reduction_of_whole_numbers_is_exact_and_wraps[DEVICE-2]")
class RoundsAveragesDown(Changes):
    def changed(self, name, work, offers):
        first = offers[0].tensors[0]
        if name == "allreduce" and "avg" in offers[0].note and first.dtype is torch.int8:
            total = sum(offer.tensors[0].long() for offer in offers).div(len(offers), rounding_mode="floor")
            return [lambda o=o: o.tensors[0].copy_(total) for o in offers]

        return work(offers)


@wrong("test_floats_are_added_in_rank_order_on_every_rank_and_in_every_run[DEVICE-5]")
class AddsInTheOrderOfArrival(Reduces):
    def total(self, inputs, call):
        return sum(reversed(inputs[:-1]), inputs[-1])


@wrong("test_half_precision_is_rounded_once")
class RoundsEachStep(Reduces):
    def total(self, inputs, call):
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x

        return total


@wrong("test_reduction_of_bool_is_logical[DEVICE-3]")
class AddsBools(Reduces):
    def total(self, inputs, call):
        return sum(x.to(torch.uint8) for x in inputs).eq(1) if inputs[0].dtype is torch.bool else sum(inputs)


# Works


@wrong("test_call_returns_before_the_others_have_come[all_reduce]")
class WaitsInTheCall(Around):
    def around(self, name, call):
        work = call()
        work.wait()
        return work


@wrong("test_work_that_is_dropped_ends_all_the_same")
class WorksWhenItIsWaitedFor(SameDeviceProcessGroup):
    def allreduce(self, tensors, *opts):
        return Later(lambda: super(WorksWhenItIsWaitedFor, self).allreduce(tensors, *opts))


class Later:
    def __init__(self, begin):
        self._begin, self._work = begin, None

    def __getattr__(self, name):
        if self._work is None:
            self._work = self._begin()

        return getattr(self._work, name)


@wrong("test_work_carries_what_the_blocking_call_returns[DEVICE-all_reduce]")
class NeverFulfilsItsFutures(Works):
    class work(EndsWork):
        def _fulfil(self, future):
            pass


@wrong("test_many_in_flight_are_waited_for_in_any_order[DEVICE-2]")
class HasOneResultInFlight(SameDeviceProcessGroup):
    """The buffer of one call is that of the next."""

    def broadcast(self, tensors, *opts):
        kept = self.__dict__.setdefault("buffers", {}).setdefault(tensors[0].shape, tensors[0].clone())
        kept.copy_(tensors[0])
        return CopiesLater(super().broadcast([kept], *opts), kept, tensors[0])


class CopiesLater:
    def __init__(self, work, source, target):
        self._work, self._source, self._target = work, source, target

    def wait(self, timeout=None):
        self._work.wait(timeout)
        self._target.copy_(self._source)
        return True

    def __getattr__(self, name):
        return getattr(self._work, name)


@wrong("test_future_can_be_followed")
class FulfilsTooEarly(Works):
    class work(EndsWork):
        def get_future(self):
            future = torch.futures.Future()
            future.set_result([torch.zeros_like(tensor) for tensor in self._outputs])
            return future


# Mismatches


@wrong("test_mismatch_raises_on_every_rank[dtype of all_reduce]")
class SwallowsMismatches(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except CollectiveMismatchError:
                pass


@wrong("test_mismatch_raises_on_every_rank[root of broadcast]")
class ComparesNames(Changes):
    def _changed_post(self, note, tensors, collective, *stream):
        return self._post(note.partition("(")[0], tensors, collective, *stream)


@wrong("test_mismatch_raises_on_every_rank[dtype of all_reduce]")
class NamesNobody(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except CollectiveMismatchError:
                raise CollectiveMismatchError("somebody called something else") from None


@wrong("test_mismatch_raises_on_every_rank[dtype of all_reduce]")
class IsUselessAfterwards(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except CollectiveMismatchError:
                time.sleep(0.05)
                with self._ticket._joint.presence.mutex:
                    self._ticket._joint.presence.abort("broken")

                raise


@wrong("test_wrong_call_raises_there_and_is_told_to_the_others[too few tensors]")
class KeepsMistakesToItself(SameDeviceProcessGroup):
    def refuse(self, call, error):
        next(self._engine._numbers)


# Endings


@wrong("test_timeout_names_who_has_not_come_and_who_gave_up[all_reduce]")
class IgnoresTimeouts(Works):
    class work(EndsWork):
        def _end(self, timeout):
            super()._end(60.0)


@wrong("test_timeout_names_who_has_not_come_and_who_gave_up[all_reduce]")
class NamesNobodyWhoIsLate(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except StoreTimeoutError:
                raise StoreTimeoutError("too late") from None


@wrong("test_timeout_names_who_has_not_come_and_who_gave_up[barrier]")
class ForgetsWhoGaveUp(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except StoreTimeoutError:
                self._ticket._joint._retired = None
                raise


@wrong("test_timeout_is_each_ranks_own[barrier]")
class EndsForAllAtTheFirstDeadline(Works):
    class work(EndsWork):
        def _end(self, timeout):
            try:
                super()._end(timeout)
            except StoreTimeoutError as error:
                joint = self._ticket._joint
                with joint.presence.mutex:
                    joint.presence.aborted = str(error)
                    woken = joint.give_up()

                for waiter in woken:
                    waiter.wake()

                raise


@wrong("test_abort_wakes_every_rank_now_and_later[all_to_all_list]")
class HangsOnAbort(SameDeviceProcessGroup):
    def abort(self, reason="", *, died=False):
        pass


@wrong("test_abort_wakes_every_rank_now_and_later[all_gather]")
class AbortsTheLaterCallsOnly(SameDeviceProcessGroup):
    def abort(self, reason="", *, died=False):
        self._store._session.presence.aborted = reason


@wrong("test_close_is_a_goodbye")
class LeavesWithoutAGoodbye(SameDeviceProcessGroup):
    def shutdown(self):
        pass


@wrong("test_rank_that_fails_ends_the_run_at_once[barrier]")
class CallsADeathAnAbort(SameDeviceProcessGroup):
    def __init__(self, ctx):
        super().__init__(ctx)
        store_abort = self._store.abort
        self._store.abort = lambda reason, *, died=False: store_abort(reason)

    def abort(self, reason="", *, died=False):
        self._store.abort(reason)


@wrong("test_close_right_after_the_last_call_disturbs_nobody")
class LeavesAThread(SameDeviceProcessGroup):
    def shutdown(self):
        super().shutdown()
        threading.Thread(target=time.sleep, args=(3 * PATIENCE,), daemon=True).start()


# Messages


@wrong("test_messages_are_told_apart_by_tag")
class IgnoresTags(SameDeviceProcessGroup):
    def send(self, tensors, dst, tag=0):
        return super().send(tensors, dst, 0)

    def receive(self, src, tag, buffer=None):
        return super().receive(src, 0, buffer)


@wrong("test_messages_arrive_in_order")
class SendsTheLatestFirst(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        letters = self._store._session.letters._letters[self.rank()]
        letters.reverse()
        return super().receive(src, tag, buffer)


@wrong("test_message_is_a_copy")
class SendsTheTensorItself(SameDeviceProcessGroup):
    def send(self, tensors, dst, tag=0):
        work = super().send(tensors, dst, tag)
        letters = self._store._session.letters._letters[dst]
        if letters:
            letters[-1].tensor = tensors[0]

        return work


@wrong("test_receive_can_be_retried_after_a_timeout")
class LosesWhatComesAfterATimeout(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        work = super().receive(src, tag, buffer)
        work.cancel = lambda: False
        return work


@wrong("test_out_that_does_not_fit_a_message_is_an_error")
class FillsWhatFits(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        work = super().receive(src, tag, buffer)
        work._store = lambda message, source: message if buffer is None else fill(buffer, message)
        return work


def fill(buffer, message):
    count = min(buffer.numel(), message.numel())
    buffer.view(-1)[:count].copy_(message.view(-1)[:count])
    return buffer


@wrong("test_message_from_anybody")
class ListensToOneRankOnly(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        return super().receive(1 if src is None else src, tag, buffer)


@wrong("test_receive_from_a_rank_that_left")
class WaitsForTheGone(SameDeviceProcessGroup):
    def receive(self, src, tag, buffer=None):
        work = super().receive(src, tag, buffer)
        end = work._end

        def patiently(timeout):
            try:
                end(timeout)
            except ConnectionError:
                raise AbortedError("it will not come") from None

        work._end = patiently
        return work


# CUDA


class Unordered(EndsWork):
    def _end(self, timeout):
        call = self._ticket._call
        if not call.finished or call.error is not None:
            self._ticket._joint.wait_for(call, self._ticket._rank, timeout)


@wrong("test_cuda_result_is_ordered_after_every_ranks_work")
class OrdersNoStreamAfterTheWork(Works):
    work = Unordered


@wrong("test_cuda_result_is_ordered_after_every_ranks_work")
class WaitsOnTheHost(Works):
    class work(EndsWork):
        def _end(self, timeout):
            super()._end(timeout)
            if torch.cuda.is_available():
                torch.cuda.synchronize()


@wrong("test_cuda_wait_orders_the_waiting_stream")
class OrdersTheCallingStreamOnly(Works):
    class work(Unordered):
        def __init__(self, ticket, outputs, timeout):
            super().__init__(ticket, outputs, timeout)
            self._stream = torch.cuda.current_stream()

        def _end(self, timeout):
            super()._end(timeout)
            if self._ticket._call.queued is not None:
                self._ticket._call.queued.order(None, self._stream)


@wrong("test_cuda_result_is_ordered_after_every_ranks_work")
class ReadsBeforeTheInputsAreWritten(SameDeviceProcessGroup):
    def __init__(self, ctx):
        super().__init__(ctx)
        post = self._store.post

        def hasty(key, note, tensors, work, *, stream=None):
            idle = torch.cuda.Stream() if tensors and tensors[0].is_cuda else None
            return post(key, note, tensors, work, stream=idle)

        self._store.post = hasty


class Plugin:
    @hookimpl
    def dtorch_register_thread_groups(self):
        kinds = [SameDeviceProcessGroup, *WRONG]
        names = ["right", *(group.__name__ for group in WRONG)]
        return [
            BackendSpec(name, f"{__name__}:{kind.__name__}", same_device, capabilities=ALL)
            for name, kind in zip(names, kinds, strict=True)
        ]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="wrong groups")
    yield
    dtorch_core.unregister("wrong groups")


class TestWrongGroups:
    @pytest.mark.parametrize("group", WRONG, ids=lambda group: group.__name__)
    def test_bug_is_caught(self, group):
        if group.caught_by.startswith("test_cuda") and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")

        begun = time.monotonic()
        outcomes = run_kit("group", group.__name__, select=[group.caught_by], patience=PATIENCE)
        assert outcomes, f"there is no test {group.caught_by}"
        assert "failed" in {outcome.state for outcome in outcomes}, [outcome.why for outcome in outcomes]
        assert time.monotonic() - begun < 20

    def test_right_group_passes_what_catches_them(self):
        outcomes = run_kit("group", "right", select=[group.caught_by for group in WRONG])
        assert [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"] == []
        ran = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "passed"}
        wanted = {group.caught_by.partition("[")[0] for group in WRONG}
        assert ran >= {test for test in wanted if torch.cuda.is_available() or not test.startswith("test_cuda")}
