"""The file promise: errors that go to other processes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from dtorch_file_store.promise_errors import RemoteError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_promise_workers")
    import file_promise_workers as processes
    from file_promise_workers import WAIT, Clean, Worker, handed

template, worker, workers = processes.template, processes.worker, processes.workers  # fixtures


class TestErrors(Clean):
    def raised(self, worker: Worker, code: str) -> BaseException:
        token, future = handed()
        worker.do(f"promise = attach_promise(token)\n{textwrap.dedent(code)}", token=token)
        error = future.exception(WAIT)
        assert error is not None
        return error

    def test_error_keeps_its_type_and_traceback(self, worker: Worker) -> None:
        error = self.raised(
            worker,
            """
            def fails():
                raise FileNotFoundError(2, "on purpose", "a.txt")
            try:
                fails()
            except OSError as raised:
                promise.set_exception(raised)
            """,
        )
        assert type(error) is FileNotFoundError and error.filename == "a.txt"
        (note,) = error.__notes__
        assert f"In pid {worker.pid}:" in note and "in fails" in note

    def test_error_that_was_never_raised_has_no_traceback(self, worker: Worker) -> None:
        error = self.raised(worker, "promise.set_exception(KeyError('k'))")
        assert (type(error), error.args, hasattr(error, "__notes__")) == (KeyError, ("k",), False)

    @pytest.mark.parametrize(
        "code",
        [
            pytest.param("class Own(ValueError): pass\nerror = Own('text 7')", id="type of a script"),
            pytest.param("error = ValueError('text 7'); error.held = open('/dev/null')", id="holds what can't travel"),
            pytest.param(
                "from dtorch_core.testing._promise_ending import OddError\n"
                "class Own(OddError):\n    def __reduce__(self): raise ZeroDivisionError\n"
                "error = Own('text 7')",
                id="refuses to be pickled",
            ),
            pytest.param(
                "class Own(ValueError):\n    def __reduce__(self): return (int, ('no number',))\nerror = Own('text 7')",
                id="refuses to be made again",
            ),
            pytest.param(
                "class Own(ValueError):\n    def __reduce__(self): return (int, ('7',))\nerror = Own('text 7')",
                id="becomes something else",
            ),
        ],
    )
    def test_error_that_cant_travel_is_told_in_words(self, code: str, worker: Worker) -> None:
        error = self.raised(
            worker,
            f"""
{code}
try:
    raise error
except Exception as raised:
    promise.set_exception(raised)
error.held = None
del error
""",
        )
        assert type(error) is RemoteError
        assert "text 7" in str(error) and f"pid {worker.pid}" in str(error)
        assert error.type_name in ("__main__.Own", "ValueError") and error.type_name in str(error)
        assert "raise error" in error.__notes__[0] or "Traceback" in error.__notes__[0]

    def test_error_of_any_length(self, worker: Worker) -> None:
        error = self.raised(worker, "promise.set_exception(ValueError('x' * 3_000_000))")
        assert type(error) is ValueError and len(str(error)) == 3_000_000

    @pytest.mark.parametrize("name", ["KeyboardInterrupt", "SystemExit"])
    def test_error_that_would_end_a_thread(self, name: str, worker: Worker) -> None:
        assert type(self.raised(worker, f"promise.set_exception({name}('x'))")).__name__ == name
