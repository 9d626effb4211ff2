"""The file promise: what every promise owes, how it is chosen, and values that go to other processes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from dtorch_file_store import promise_packets
from dtorch_file_store.wire import INLINE_BYTES

from dtorch_core import attach_promise, make_promise
from dtorch_core.testing import PromiseTests
from dtorch_core.testing._held import Held
from dtorch_core.testing._layouts import DTYPES, LAYOUTS, of_dtype
from dtorch_core.testing._store_base import coded, same

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_promise_workers")
    import file_promise_workers as processes
    from file_promise_workers import BIG, WAIT, Clean, Worker, handed, maps, value_of

# Fixtures.
template = processes.template
victim = processes.victim
worker = processes.worker
workers = processes.workers


class TestFilePromise(PromiseTests):
    backend = "file"


class TestChoice:
    def test_promise_for_another_process_is_file(self) -> None:
        promise = make_promise(reach="process")
        assert promise.selection.chosen == "file"
        promise.set_result(None)

    def test_promise_within_this_process_is_memory_where_there_is_memory(self) -> None:
        pytest.importorskip("dtorch_memory_store")
        promise = make_promise()
        assert promise.selection.chosen == "memory"
        assert "memory is better" in str(promise.selection)
        promise.set_result(None)

    def test_promise_that_stays_here_needs_no_thread_no_file_and_no_copy(self) -> None:
        before = Held.now()
        promise = make_promise(reach="process")
        future = promise.future()
        sent = coded(1, BIG)
        promise.set_result(sent)
        assert Held.now() == before
        assert value_of(future).data_ptr() == sent.data_ptr()

    def test_token_that_comes_back_needs_no_copy(self) -> None:
        token, future = handed()
        sent = coded(1, BIG)
        attach_promise(token).set_result(sent)
        assert value_of(future).data_ptr() == sent.data_ptr()


class TestValues(Clean):
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layout_arrives_with_its_values(self, layout: str, worker: Worker) -> None:
        token, future = handed()
        worker.do(
            """
            from dtorch_core.testing._layouts import LAYOUTS
            attach_promise(token).set_result(LAYOUTS[layout]())
            """,
            token=token,
            layout=layout,
        )
        got, wanted = value_of(future), LAYOUTS[layout]()
        assert same(got, wanted)
        assert same(got.clone(), wanted)
        assert got.untyped_storage().nbytes() <= wanted.nbytes

    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_dtype_arrives_bit_for_bit(self, dtype: torch.dtype, worker: Worker) -> None:
        token, future = handed()
        worker.do(
            """
            from dtorch_core.testing._layouts import of_dtype
            attach_promise(token).set_result(of_dtype(dtype, "cpu"))
            """,
            token=token,
            dtype=dtype,
        )
        got = value_of(future)
        assert (got.dtype, got.shape) == (dtype, (6,))
        assert torch.equal(got.view(torch.uint8), of_dtype(dtype, "cpu").view(torch.uint8))

    @pytest.mark.parametrize("nbytes", [INLINE_BYTES - 4, INLINE_BYTES, INLINE_BYTES + 4, 4096 * 5, 64 << 20])
    def test_size_does_not_matter(self, nbytes: int, worker: Worker) -> None:
        token, future = handed()
        worker.do("attach_promise(token).set_result(torch.arange(n, dtype=torch.float32))", token=token, n=nbytes // 4)
        got = value_of(future)
        assert torch.equal(got, torch.arange(nbytes // 4, dtype=torch.float32))
        assert got.untyped_storage().nbytes() == nbytes

    @pytest.mark.parametrize(
        ("view", "stored"),
        [
            ("x.t()", 1),
            ("x[:, ::2]", 1 / 2),
            ("x[1:2].expand(4096, 64)", None),
            ("x[:512].expand(3, 512, 64)", 1 / 8),
            ("torch.complex(x, x + 7).conj()", 2),
            ("torch.complex(x, x + 7).conj().imag", 1),
            ("x.as_strided((4000, 65), (64, 1))", None),
        ],
    )
    def test_large_layout_arrives_with_its_values(self, view: str, stored: float | None, worker: Worker) -> None:
        """Each element that it addresses travels once."""
        token, future = handed()
        worker.do(
            f"x = torch.arange({BIG[0] * BIG[1]}.0).reshape({BIG})\nattach_promise(token).set_result({view})",
            token=token,
        )
        x = torch.arange(float(BIG[0] * BIG[1])).reshape(BIG)
        got = value_of(future)
        assert same(got, eval(view, {"x": x, "torch": torch}))
        if stored is not None:
            assert got.untyped_storage().nbytes() == pytest.approx(x.nbytes * stored, rel=0.01)

    def test_mapping_lives_as_long_as_the_value(self, worker: Worker) -> None:
        before = maps()
        token, future = handed()
        worker.do(f"attach_promise(token).set_result(torch.arange({BIG[0] * BIG[1]}.0))", token=token)
        part = value_of(future)[5:8]
        del future
        gc.collect()
        assert maps() == before + 1
        assert part.tolist() == [5.0, 6.0, 7.0]
        part[0] = 1.0  # the memory is this process's alone
        del part
        gc.collect()
        assert maps() == before

    def test_value_outlives_the_process_that_set_it(self, victim: Worker) -> None:
        token, future = handed()
        victim.do(f"attach_promise(token).set_result(torch.arange({BIG[0] * BIG[1]}.0))", token=token)
        victim.kill()
        assert torch.equal(value_of(future), torch.arange(float(BIG[0] * BIG[1])))

    def test_nothing_arrives_as_none(self, worker: Worker) -> None:
        token, future = handed()
        worker.do("attach_promise(token).set_result(None)", token=token)
        assert future.result(WAIT) is None

    def test_value_for_which_there_is_no_memory_is_refused(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The holder still has the right to set, and tells what went wrong."""
        token = worker.do("p = make_promise(reach='process'); f = p.future(); answer = p.serialize()")
        promise = attach_promise(token)
        monkeypatch.setattr(promise_packets, "why_not", lambda nbytes: "this machine has 3 bytes left")
        with pytest.raises(MemoryError, match=r"promise .*1 MiB: this machine has 3 bytes left"):
            promise.set_result(coded(1, BIG))

        promise.set_exception(ValueError("no memory"))
        assert worker.do("answer = str(f.exception(30)); del p, f") == "no memory"
