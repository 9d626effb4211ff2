"""What is asked of CUDA's driver, how it says no, and which devices can be shared."""

from pathlib import Path

import pytest
from dtorch_file_store.cuda import driver as driver_module
from dtorch_file_store.cuda.devices import Devices, reaches
from dtorch_file_store.cuda.driver import Driver, DriverError, driver

from dtorch_core.errors import DtorchError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_cuda_ours as ours
    from file_cuda_ours import HERE, THERE, OurDriver

calls = ours.calls  # a fixture


class FakeCall:
    def __init__(self, answer):
        self.answer = answer

    def __call__(self, *arguments):
        return self.answer(*arguments)


class FakeLibrary:
    """Every call succeeds, but those that are said to fail."""

    def __init__(self, **fails):
        self.fails = fails

    def __getattr__(self, symbol):
        if symbol == "cuIpcCloseMemHandle" and "missing" in self.fails:
            raise AttributeError(symbol)

        if symbol == "cuGetErrorName":
            return FakeCall(self.name)

        return FakeCall(lambda *_: 7 if symbol in self.fails else 0)

    def name(self, code, place):
        place._obj.value = self.fails["named"].encode() if "named" in self.fails else None
        return 0


class TestDriver:
    def test_a_failed_call_says_its_name_and_the_way_out(self):
        library = FakeLibrary(cuIpcGetMemHandle=True, named="CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(DtorchError, match="cuIpcGetMemHandle failed with CUDA_ERROR_INVALID_VALUE: the memory was"):
            Driver(library).ipc_handle(4096)

    def test_an_error_that_the_driver_has_no_name_for_is_a_number(self):
        with pytest.raises(DriverError, match="cuInit failed with error 7$"):
            Driver(FakeLibrary(cuInit=True))

    def test_an_old_driver_is_named_by_what_it_lacks(self):
        with pytest.raises(DriverError, match="has no cuIpcCloseMemHandle: install a driver"):
            Driver(FakeLibrary(missing=True))

    def test_without_a_driver_the_reason_is_told(self, monkeypatch):
        monkeypatch.setattr(driver_module, "LIBRARY", "libcuda_of_nobody.so.1")
        driver.cache_clear()
        try:
            assert "libcuda_of_nobody.so.1 can't be loaded" in reaches(HERE)
        finally:
            driver.cache_clear()

    def test_a_context_is_pushed_only_where_another_is_current(self):
        calls, done = Driver(FakeLibrary()), []
        calls.push, calls.pop = done.append, lambda: done.append("pop")
        calls._primaries[0] = 5
        for current in (5, 6):
            calls.context = lambda current=current: current
            with pytest.raises(KeyError), calls.on(0):
                done.append(f"in {current}")
                raise KeyError

        assert done == ["in 5", 5, "in 6", "pop"]

    @pytest.mark.parametrize(("stream", "needs"), [(7, False), (7, True), (0, True)])
    def test_a_stream_is_given_work_in_its_own_context(self, stream, needs):
        calls, done = Driver(FakeLibrary()), []
        calls._primaries[0] = 5
        calls.context, calls.push, calls.pop = lambda: done.append("current") or 6, done.append, lambda: None

        def wait(*arguments):
            done.append(arguments)
            return 201 if needs and 5 not in done else 0

        calls._stream_wait = wait
        calls.stream_wait(0, stream, 4096, 3)
        queued = (stream, 4096, 3, 0)
        assert done == [queued] * (stream != 0) + ["current", 5, queued] * needs


class TestDevices:
    def test_ordinals_go_by_uuid(self):
        devices = Devices(OurDriver([THERE, HERE]))
        assert devices.ordinal(HERE) == 1 and devices.reaches(HERE) is None
        assert devices.ordinal("ef" * 16) is None and "does not see the device efef" in devices.reaches("ef" * 16)

    @pytest.mark.parametrize(
        ("attribute", "value", "reason"),
        [
            (driver_module.COMPUTE_MODE, 3, "exclusive to one process"),
            (driver_module.INTEGRATED, 1, "integrated"),
            (driver_module.IPC_EVENT_SUPPORTED, 0, "no interprocess handles"),
            (driver_module.HOST_REGISTER_SUPPORTED, 0, "pages of the host"),
        ],
    )
    def test_what_forbids_sharing_is_said(self, calls, attribute, value, reason):
        calls.attributes[attribute] = value
        assert reason in Devices(calls).reaches(HERE)
