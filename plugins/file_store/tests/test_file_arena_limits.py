"""How much shared memory there may be: whatever forbids more is said in words, and what was begun is undone."""

import errno
import os
from pathlib import Path

import pytest
from dtorch_file_store import headroom, segments
from dtorch_file_store.arena import Arena
from dtorch_file_store.headroom import BUDGET, VARIABLE

from dtorch_core import DtorchError, NoRoomError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_arena_parts")
    import file_arena_parts as parts
    from file_arena_parts import MIB, numbered, traces

arena, made = parts.arena, parts.made  # fixtures


class TestLimits:
    def test_variable_limits_all_arenas_of_the_process(self, arena, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 6 * MIB))
        other = Arena("store 'other'", lambda segment: None)
        kept = arena.allocate(3 * MIB)
        with pytest.raises(NoRoomError) as caught:
            other.allocate(3 * MIB)

        text = str(caught.value)
        assert text.startswith("store 'other': no shared memory for 3 MiB: this process holds ")
        assert VARIABLE in text and "wait for them earlier" in text
        assert isinstance(caught.value, DtorchError) and isinstance(caught.value, MemoryError)
        assert other.allocate(MIB).bytes().copy_(numbered(MIB))[77] == 77  # what is left can be had
        kept.release()
        assert arena.allocate(3 * MIB).offset == kept.offset
        other.close()

    def test_message_says_what_is_free_and_in_how_large_pieces(self, arena, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 4 * MIB))
        blocks = [arena.allocate(MIB) for _ in range(4)]
        blocks[0].release()
        blocks[2].release()
        with pytest.raises(NoRoomError, match="Of the 4 MiB .* in this process, 2 MiB are free, 1 MiB in one"):
            arena.allocate(2 * MIB)

    def test_idle_segments_make_room(self, arena, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 16 * MIB))
        for size in (6, 9, 14, 3, 16, 5):
            arena.allocate(size * MIB).release()

    def test_idle_segments_of_other_stores_make_room(self, arena, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 16 * MIB))
        other = Arena("store 'other'", lambda segment: None)
        for size in (9, 14, 3, 16, 5):
            other.allocate(size * MIB).release()
            arena.allocate(size * MIB).release()

        other.close()

    def test_store_that_grows_is_left_alone(self, arena, monkeypatch):
        """Two that are short of memory at once would wait for each other."""
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 8 * MIB))
        other = Arena("store 'other'", lambda segment: None)
        other.allocate(6 * MIB).release()
        with other._growing, pytest.raises(NoRoomError):
            arena.allocate(6 * MIB)

        arena.allocate(6 * MIB).release()
        other.close()

    @pytest.mark.parametrize("text", ["4GB", "-1", "1e9", "²"])
    def test_variable_that_is_no_number_is_an_error(self, arena, monkeypatch, text):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(DtorchError, match=f"{VARIABLE} must be a whole number of bytes, not '{text}'"):
            arena.allocate(10)

    def test_machine_without_memory_is_said(self, arena, monkeypatch):
        monkeypatch.setattr(headroom, "_room", lambda: iter([(100 * MIB, "this machine")]))
        with pytest.raises(NoRoomError, match=r"for 50 MiB: this machine has 100 MiB left, of which 64 MiB stay free"):
            arena.allocate(50 * MIB)

        arena.allocate(MIB)

    def test_more_than_the_machine_has_is_refused(self, arena):
        before, held = traces(), BUDGET.held
        with pytest.raises(NoRoomError, match="this machine has|control group"):
            arena.allocate(1 << 45)

        assert (traces(), BUDGET.held) == (before, held)

    def test_memory_that_others_take_meanwhile_is_noticed(self, arena, monkeypatch):
        looks = iter([None] * 2 + ["this machine has nothing left"] * 20)
        monkeypatch.setattr(segments, "why_not", lambda nbytes: next(looks))
        before, held = traces(), BUDGET.held
        with pytest.raises(NoRoomError, match="this machine has nothing left"):
            arena.allocate(200 * MIB)

        assert (traces(), BUDGET.held) == (before, held)

    @pytest.mark.parametrize(
        ("call", "number", "text"),
        [
            ("memfd_create", errno.EMFILE, "no file can be made for it: Too many open files"),
            ("ftruncate", errno.EFBIG, "the kernel refused it: File too large"),
            ("posix_fallocate", errno.ENOSPC, "the kernel refused it: No space left on device"),
        ],
    )
    def test_refusal_by_the_kernel_is_said(self, arena, monkeypatch, call, number, text):
        def refuse(*args):
            raise OSError(number, os.strerror(number))

        before, held = traces(), BUDGET.held
        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(NoRoomError, match=text):
            arena.allocate(10)

        monkeypatch.undo()
        assert (traces(), BUDGET.held) == (before, held)
        arena.allocate(10)

    def test_mapping_that_the_kernel_refuses_is_said(self, arena, monkeypatch):
        def refuse(fd, size):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        before, held = traces(), BUDGET.held
        monkeypatch.setattr(segments, "_map", refuse)
        with pytest.raises(NoRoomError, match="the kernel refused it: Cannot allocate memory"):
            arena.allocate(10)

        assert (traces(), BUDGET.held) == (before, held)

    def test_control_group_is_read(self, tmp_path):
        inner = tmp_path / "outer" / "inner"
        inner.mkdir(parents=True)
        (inner / "memory.max").write_text("max\n")
        (inner / "memory.current").write_text("5\n")
        (inner.parent / "memory.max").write_text(f"{100 * MIB}\n")
        (inner.parent / "memory.current").write_text(f"{70 * MIB}\n")
        (inner.parent / "memory.stat").write_text(f"anon 7\ninactive_file {20 * MIB}\n")
        found = list(headroom._room_above(tmp_path, "/outer/inner", "memory.max", "memory.current"))
        assert found == [(50 * MIB, f"the control group {inner.parent}")]

    @pytest.mark.parametrize(
        ("nbytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (3 << 29, "1.5 GiB")]
    )
    def test_sizes_are_written_in_one_way(self, nbytes, text):
        assert headroom.size_text(nbytes) == text
