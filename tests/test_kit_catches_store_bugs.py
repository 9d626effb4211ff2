"""The store kit is itself tested: each wrong store here has one bug, and the test that should catch it does."""

import contextlib
import os
import threading
import time

import pytest
import torch
from dtorch_memory_store.store import MemoryTensorStore

import dtorch_core
from dtorch_core import BackendSpec, KeyInUseError, ProtocolError, StoreTimeoutError, Support, hookimpl
from dtorch_core.testing import run_kit
from dtorch_core.testing._harness import DEVICES

ALL = frozenset({"cpu", "cuda", "cross_device", "zero_copy"})

PATIENCE = 1.0
"""Seconds for tests that are to fail; the right store gets all the time it may need."""

HANG = 4.0
"""Seconds: longer than a hanging test may take, short enough that its thread is soon gone."""


def within_one_process(topology):
    if topology.same_process:
        return Support.yes(1, "threads of one process")

    return Support.no("several processes")


def wrong(test, *, capabilities=ALL, probe=within_one_process):
    """Mark a wrong store with the kit's test that has to catch it."""

    def mark(store):
        store.caught_by, store.capabilities, store.probe = test, frozenset(capabilities), staticmethod(probe)
        WRONG.append(store)
        return store

    return mark


WRONG = []


@wrong("test_wait_lasts_until_every_consumer_has_finished")
class FinishesWithTheGet(MemoryTensorStore):
    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        super().dest_finish_get(key)
        return got

    def dest_finish_get(self, key, **kw):
        pass


@wrong("test_writable_reaches_the_producer_from_every_consumer")
class LosesUpdates(MemoryTensorStore):
    def dest_get(self, key, **kw):
        return super().dest_get(key, **kw).clone()


@wrong("test_memory_from_empty_is_not_copied")
class CopiesWhatItCallsZeroCopy(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.clone(), get_count, **kw)


@wrong("test_borrowed_tensor_is_each_consumers_own_object")
class HandsOutOneObject(MemoryTensorStore):
    handed = {}

    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        return self.handed.setdefault((self._token, key), got)


@wrong("test_rank_gets_each_generation_once")
class GivesARankTwoShares(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._before = {}

    def dest_get(self, key, **kw):
        if key in self._before:
            return self._before.pop(key)

        self._before[key] = super().dest_get(key, **kw)
        return self._before[key]


@wrong("test_get_count_is_how_many_get_it")
class GivesEverybodyAShare(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, self.world_size, **kw)


@wrong("test_get_count_above_the_number_of_ranks_is_an_error")
class TakesFewerConsumersThanAsked(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, min(get_count, self.world_size), **kw)


@wrong("test_consumers_may_come_first")
class NeverWakesAConsumer(MemoryTensorStore):
    def dest_get(self, key, *, stream=None, timeout=None):
        try:
            return super().dest_get(key, stream=stream, timeout=0)
        except StoreTimeoutError:
            threading.Event().wait(self.timeout if timeout is None else timeout)
            raise


@wrong("test_many_keys_are_in_flight_at_once")
class HasRoomForFewKeys(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(str(hash(key) % 51), tensor, get_count, **kw)

    def dest_get(self, key, **kw):
        return super().dest_get(str(hash(key) % 51), **kw)

    def dest_finish_get(self, key, **kw):
        super().dest_finish_get(str(hash(key) % 51), **kw)

    def src_wait_until_get_finished(self, key, **kw):
        super().src_wait_until_get_finished(str(hash(key) % 51), **kw)


@wrong("test_key_is_free_after_the_wait")
class NeverFreesAKey(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._used = set()

    def src_set(self, key, tensor, get_count, **kw):
        if key in self._used:
            raise KeyInUseError(key)

        super().src_set(key, tensor, get_count, **kw)
        self._used.add(key)


@wrong("test_live_key_refuses_a_second_set")
class OverlooksALiveKey(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        with contextlib.suppress(KeyInUseError):
            super().src_set(key, tensor, get_count, **kw)


@wrong("test_finish_without_a_get_is_an_error")
class SwallowsAnError(MemoryTensorStore):
    def dest_finish_get(self, key, **kw):
        with contextlib.suppress(ProtocolError):
            super().dest_finish_get(key, **kw)


@wrong("test_wait_for_a_key_never_set_is_an_error")
class WaitsForNothing(MemoryTensorStore):
    def src_wait_until_get_finished(self, key, **kw):
        with contextlib.suppress(ProtocolError):
            super().src_wait_until_get_finished(key, **kw)


@wrong("test_get_count_below_one_is_an_error")
class TakesAnyCount(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, max(1, int(get_count or 1)), **kw)


@wrong("test_stores_of_other_names_share_no_keys")
class HasOneSpaceForAllNames(MemoryTensorStore):
    """Keys are shared between the stores of one run."""

    first = {}

    def __init__(self, ctx):
        super().__init__(ctx)
        run = threading.current_thread().ident
        self._session = self.first.setdefault(run, self._session)


@wrong("test_barrier_lets_nobody_through_early")
class LetsThroughEarly(MemoryTensorStore):
    def barrier(self, *, timeout=None):
        pass


@wrong("test_dtype_arrives_bit_for_bit")
class Widens(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.to(torch.int32) if tensor.dtype is torch.uint16 else tensor, get_count, **kw)


@wrong("test_layout_arrives_with_its_values")
class DropsTheConjugateBit(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.conj() if tensor.is_conj() else tensor, get_count, **kw)


@wrong("test_layout_arrives_with_its_values")
class DropsTheNegativeBit(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, torch._neg_view(tensor) if tensor.is_neg() else tensor, get_count, **kw)


@wrong("test_layout_arrives_with_its_values")
class ForgetsStrides(MemoryTensorStore):
    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        flat = got.as_strided((got.untyped_storage().nbytes() // got.element_size(),), (1,), 0)
        return flat[: got.numel()].reshape(got.shape) if flat.numel() >= got.numel() else got


@wrong("test_borrowed_storage_spans_its_own_bytes_only")
class ShowsMoreThanTheTensor(MemoryTensorStore):
    def dest_get(self, key, **kw):
        got = super().dest_get(key, **kw)
        return torch.stack([got, got])[0]


@wrong("test_requires_grad_arrives_detached")
class KeepsTheGraph(MemoryTensorStore):
    def dest_get(self, key, **kw):
        return super().dest_get(key, **kw).requires_grad_()


@wrong("test_what_cannot_be_carried_is_refused_by_name")
class TakesSparseForDense(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
            tensor = tensor.to_dense()

        super().src_set(key, tensor, get_count, **kw)


@wrong("test_reference_is_dropped")
class KeepsEveryTensor(MemoryTensorStore):
    kept = []

    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor, get_count, **kw)
        self.kept.append(tensor)


@wrong("test_copy_to_a_device_is_owned")
class BorrowsWhereItShouldCopy(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        got = self.dest_get(key, stream=stream, timeout=timeout)
        self.dest_finish_get(key, stream=stream)
        return got.to(device)


@wrong("test_copy_that_fails_ends_the_borrow")
class KeepsTheBorrowOfAFailedCopy(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        copy = self.dest_get(key, stream=stream, timeout=timeout).to(device, copy=True)
        self.dest_finish_get(key, stream=stream)
        return copy


@wrong("test_publish_does_not_wait_if_its_body_raised")
class WaitsAfterAnError(MemoryTensorStore):
    @contextlib.contextmanager
    def publish(self, key, tensor, get_count, **kw):
        self.src_set(key, tensor, get_count, **kw)
        try:
            yield
        finally:
            self.src_wait_until_get_finished(key)


@wrong("test_borrow_finishes_if_its_body_raised")
class KeepsTheBorrowAfterAnError(MemoryTensorStore):
    @contextlib.contextmanager
    def borrow(self, key, **kw):
        yield self.dest_get(key, **kw)
        self.dest_finish_get(key)


@wrong("test_timeout_ends_the_wait_and_says_who_has_not_come[get-to the call]")
class IgnoresItsTimeout(MemoryTensorStore):
    def dest_get(self, key, *, stream=None, timeout=None):
        return super().dest_get(key, stream=stream)


@wrong("test_timeout_ends_the_wait_and_says_who_has_not_come[barrier-to the call]")
class NamesNobody(MemoryTensorStore):
    def barrier(self, *, timeout=None):
        try:
            super().barrier(timeout=timeout)
        except StoreTimeoutError:
            raise StoreTimeoutError("too late") from None


@wrong("test_get_can_be_retried_after_a_timeout")
class LosesTheShareOfALateConsumer(MemoryTensorStore):
    """The wait that was given up goes on, and takes what comes."""

    def dest_get(self, key, *, stream=None, timeout=None):
        try:
            return super().dest_get(key, stream=stream, timeout=timeout)
        except StoreTimeoutError:
            threading.Thread(target=self._take, args=(key,), daemon=True).start()
            raise

    def _take(self, key):
        with contextlib.suppress(dtorch_core.DtorchError):
            super().dest_get(key, timeout=PATIENCE)


@wrong("test_reset_drops_every_key")
class DropsNothing(MemoryTensorStore):
    def reset(self, *, timeout=None):
        self.barrier(timeout=timeout)


@wrong("test_reset_is_collective")
class ResetsAlone(MemoryTensorStore):
    def reset(self, *, timeout=None):
        with self._session.presence.mutex:
            self._session.keys._keys.clear()


@wrong("test_reset_wakes_pending_waits[get]")
class HangsInReset(MemoryTensorStore):
    def reset(self, *, timeout=None):
        threading.Event().wait(HANG)


@wrong("test_goodbye_of_the_last_other_rank_ends_waits")
class WakesNobodyOnClose(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        self._dropped.detach()

    def close(self):
        pass


@wrong("test_close_may_be_repeated_and_ends_the_handle")
class ClosesOnce(MemoryTensorStore):
    def close(self):
        if self.rank in self._session.presence.closed:
            raise ProtocolError("closed twice")

        super().close()


@wrong("test_goodbye_leaves_waits_that_another_rank_can_satisfy")
class TakesAGoodbyeForADeath(MemoryTensorStore):
    def close(self):
        self.abort("it left", died=True)
        super().close()


@wrong("test_goodbye_after_finish_is_no_loss")
class TakesItsKeysAlong(MemoryTensorStore):
    def close(self):
        with self._session.presence.mutex:
            for key in [key for key, item in self._session.keys._keys.items() if item.owner == self.rank]:
                del self._session.keys._keys[key]

        super().close()


@wrong("test_death_ends_every_wait_of_every_survivor[get]")
class TellsNobodyOfADeath(MemoryTensorStore):
    def abort(self, reason, *, died=False):
        pass


@wrong("test_death_ends_every_wait_of_every_survivor")
class TakesADeathForAGoodbye(MemoryTensorStore):
    def abort(self, reason, *, died=False):
        self.close()


@wrong("test_abort_ends_every_wait")
class HangsInAbort(MemoryTensorStore):
    def abort(self, reason, *, died=False):
        threading.Event().wait(HANG)


@wrong("test_probe_says_yes_only_to_what_is_declared", probe=lambda topology: Support.yes(1, "anywhere"))
class PromisesTooMuch(MemoryTensorStore):
    pass


@wrong("test_probe_says_yes_only_to_what_is_declared", probe=lambda topology: Support.no("nowhere"))
class PromisesNothing(MemoryTensorStore):
    pass


@wrong("test_probe_says_yes_only_to_what_is_declared", probe=lambda topology: Support.yes(time.monotonic_ns(), "now"))
class ProbesTheClock(MemoryTensorStore):
    pass


@wrong("test_other_device_is_refused_where_it_is_not_declared", capabilities={"cpu", "zero_copy"})
class IgnoresAHint(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, *, dest_device=None, **kw):
        super().src_set(key, tensor, get_count, **kw)


@wrong("test_writable_is_refused_or_honoured", capabilities={"cpu"})
class IgnoresWritable(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        super().src_set(key, tensor.clone(), get_count, **kw)


@wrong("test_handshake_of_a_rank_that_is_alone")
class LeavesAThread(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        threading.Thread(target=threading.Event().wait, args=(HANG,), daemon=True).start()


@wrong("test_handshake_of_a_rank_that_is_alone")
class LeavesAFile(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        OPENED.append(open(os.devnull))


@wrong("test_handshake_of_a_rank_that_is_alone")
class LeavesAName(MemoryTensorStore):
    def __init__(self, ctx):
        super().__init__(ctx)
        path = f"/dev/shm/dtorch-kit-test-{os.getpid()}"
        # Mapped, so that tests of other processes, which may look meanwhile, see whose it is.
        MAPPED.append(torch.from_file(path, shared=True, size=1, dtype=torch.uint8))
        NAMES.append(path)


OPENED, NAMES, MAPPED = [], [], []


@wrong("test_cuda_value_is_ordered_after_the_producers_work[stream=]")
class ForgetsTheProducersWork(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, *, stream=None, **kw):
        super().src_set(key, tensor, get_count, stream=torch.cuda.Stream(), **kw)


@wrong("test_cuda_tensor_may_be_rewritten_in_place_after_the_wait[stream=]")
class ForgetsTheConsumersWork(MemoryTensorStore):
    def dest_finish_get(self, key, *, stream=None):
        super().dest_finish_get(key, stream=torch.cuda.Stream())


@wrong("test_cuda_value_is_ordered_after_the_producers_work[current stream]")
class OrdersTheDefaultStream(MemoryTensorStore):
    def dest_get(self, key, *, stream=None, timeout=None):
        return super().dest_get(key, stream=stream or torch.cuda.default_stream(), timeout=timeout)


@wrong("test_cuda_value_is_ordered_after_the_producers_work[stream=]")
class WaitsOnTheHost(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, **kw):
        torch.cuda.synchronize()
        super().src_set(key, tensor, get_count, **kw)


@wrong("test_cuda_memory_is_kept_while_a_stream_still_reads_it")
class FreesUnderTheReader(MemoryTensorStore):
    """The reader's stream is ordered, but the allocator is told of another one."""

    def dest_get(self, key, *, stream=None, timeout=None):
        other = torch.cuda.Stream()
        got = super().dest_get(key, stream=other, timeout=timeout)
        (stream or torch.cuda.current_stream()).wait_stream(other)
        return got


@wrong("test_cuda_memory_is_given_back")
class KeepsGpuMemory(KeepsEveryTensor):
    pass


@wrong("test_cuda_copy_to_the_cpu_waits_for_its_own_copy_only")
class CopiesBehindTheCallersWork(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        copy = self.dest_get(key, stream=stream, timeout=timeout).to(device, copy=True)
        self.dest_finish_get(key, stream=stream)
        return copy


@wrong("test_cuda_copy_to_the_same_device_is_owned[cuda]")
class TakesTheDeviceForReached(MemoryTensorStore):
    def dest_get_to_device(self, key, device, *, stream=None, timeout=None):
        with self.borrow(key) as got:
            return got.to(device)


@wrong("test_cuda_hint_moves_a_cpu_tensor_on_the_producers_side")
class TakesNoHint(MemoryTensorStore):
    def src_set(self, key, tensor, get_count, *, dest_device=None, **kw):
        super().src_set(key, tensor, get_count, **kw)


class Plugin:
    @hookimpl
    def dtorch_register_tensor_stores(self):
        right = BackendSpec("right", f"{__name__}:MemoryTensorStore", within_one_process, capabilities=ALL)
        return [right] + [
            BackendSpec(store.__name__, f"{__name__}:{store.__name__}", store.probe, capabilities=store.capabilities)
            for store in WRONG
        ]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="wrong stores")
    yield
    dtorch_core.unregister("wrong stores")
    for file in OPENED:
        file.close()

    for name in NAMES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


class TestWrongStores:
    @pytest.mark.parametrize("store", WRONG, ids=lambda store: store.__name__)
    def test_bug_is_caught(self, store):
        if store.caught_by.startswith("test_cuda") and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")

        begun = time.monotonic()
        outcomes = run_kit("store", store.__name__, select=[store.caught_by], patience=PATIENCE)
        assert "failed" in {outcome.state for outcome in outcomes}, [outcome.why for outcome in outcomes]
        assert time.monotonic() - begun < 20

    def test_right_store_passes_what_catches_them(self):
        outcomes = run_kit("store", "right", select=[store.caught_by for store in WRONG])
        assert [f"{outcome.test}: {outcome.report}" for outcome in outcomes if outcome.state == "failed"] == []
        ran = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "passed"}
        wanted = {store.caught_by.partition("[")[0] for store in WRONG if store.capabilities == ALL}
        assert ran >= {test for test in wanted if torch.cuda.is_available() or not test.startswith("test_cuda")}


class TestRunKit:
    def test_outcomes_carry_capabilities_and_reasons(self):
        outcomes = run_kit("store", "right", select=["test_memory_from_empty_is_not_copied"], patience=PATIENCE)
        assert {outcome.capabilities for outcome in outcomes} == {frozenset({"zero_copy"})}
        (skipped,) = run_kit("store", "right", select=["test_writable_is_refused_or_honoured"], patience=PATIENCE)
        assert (skipped.state, skipped.why) == ("skipped", "store backend 'right' declares 'zero_copy'")

    def test_failure_names_what_was_left(self):
        test = f"test_handshake_of_a_rank_that_is_alone[{DEVICES[0]}]"
        (failed,) = run_kit("store", "LeavesAFile", select=[test], patience=PATIENCE)
        assert (failed.test, failed.state) == (test, "failed")
        assert "left behind: open file /dev/null" in failed.why

    def test_backend_that_is_not_installed_is_refused(self):
        with pytest.raises(dtorch_core.NoBackendError, match="'nonesuch'"):
            run_kit("store", "nonesuch")

    def test_replaced_test_is_noticed(self):
        from dtorch_core.testing import TensorStoreTests

        class Cheats(TensorStoreTests):
            backend = "right"

            def test_barrier_lets_nobody_through_early(self):
                pass

        with pytest.raises(AssertionError, match="test_barrier_lets_nobody_through_early is replaced"):
            Cheats().test_kit_is_complete()

        class Excuses(TensorStoreTests):
            backend = "right"

            @pytest.mark.xfail(reason="not yet")
            def test_barrier_lets_nobody_through_early(self):
                pass

        Excuses().test_kit_is_complete()
