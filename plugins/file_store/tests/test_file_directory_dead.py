"""Sessions of processes that were killed: found and removed, while live ones are left alone."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dtorch_file_store import directory
from dtorch_file_store.directory import clean_dead, sessions

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_directory_others")
    import file_directory_others as others
    from file_directory_others import LIMIT, about, joined

base, other = others.base, others.other  # fixtures


class TestCleanDead:
    def test_session_of_killed_processes_is_removed(self, base, other):
        victims = [other("abc", 0), other("abc", 1)]
        with joined("xyz") as live:
            for victim in victims:
                victim.kill()

            (removed,) = clean_dead()
            assert removed.token == "abc" and {p.pid for p in removed.processes} == {v.pid for v in victims}
            assert os.listdir(base) == ["xyz"]
            assert os.listdir(live.path) == ["0.json"]

    def test_session_with_one_live_process_is_left_whole(self, base, other):
        victim = other("abc", 0)
        with joined("abc", 1) as session:
            victim.kill()
            assert clean_dead() == []
            assert sorted(os.listdir(session.path)) == ["0.json", "1.json"]
            session.close([0])

    def test_new_session_of_the_same_name_works_at_once(self, base, other):
        other("abc", 0).kill()
        with joined("abc"):
            assert clean_dead() == []
            assert sessions()[0].alive

    def test_what_was_killed_while_joining_is_removed(self, base):
        with joined("xyz"):
            os.mkdir(os.path.join(base, "abc"))
            with open(os.path.join(base, "." + "a1" * 16), "w") as file:
                file.write("{}")

            with open(os.path.join(base, "notes"), "w") as file:
                file.write("not ours")

            assert [session.token for session in clean_dead()] == ["abc"]
            assert sorted(os.listdir(base)) == ["notes", "xyz"]

        os.unlink(os.path.join(base, "notes"))

    def test_joining_and_cleaning_at_once_never_removes_a_live_session(self, base):
        stop = threading.Event()
        errors = []

        def clean():
            while not stop.is_set():
                try:
                    clean_dead()
                except BaseException as error:
                    errors.append(error)
                    return

        cleaners = [threading.Thread(target=clean, daemon=True) for _ in range(2)]
        for thread in cleaners:
            thread.start()

        try:
            for number in range(300):
                with joined(f"s{number % 3}") as session:
                    assert os.listdir(session.path) == ["0.json"]
        finally:
            stop.set()
            for thread in cleaners:
                thread.join(LIMIT)

        assert errors == []
        clean_dead()
        assert os.listdir(base) == []

    def test_lock_of_a_forked_child_does_not_keep_a_session_alive(self, base):
        code = (
            "import os, signal\n"
            "from dtorch_file_store.directory import SessionDirectory\n"
            f"directory = SessionDirectory('abc', 0, {about()!r})\n"
            "ready, told = os.pipe()\n"
            "if not (child := os.fork()):\n"
            "    os.write(told, b'x')\n"
            "    signal.pause()\n"
            "os.read(ready, 1)\n"
            "print(child, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        child = int(parent.stdout.readline())
        try:
            parent.wait(LIMIT)
            assert [session.token for session in clean_dead()] == ["abc"]
        finally:
            os.kill(child, signal.SIGKILL)
            parent.stdout.close()


class TestCleanSome:
    """An opening removes what is dead of other sessions."""

    def test_session_of_killed_processes_goes_with_the_next_opening(self, base, other):
        victims = [other("abc", 0), other("abc", 1)]
        for victim in victims:
            victim.kill()

        with joined("xyz"):
            assert os.listdir(base) == ["xyz"]

    def test_live_sessions_are_left_whole(self, base, other):
        """Files of the dead in them, too: those are for the processes that live."""
        victim = other("abc", 0)
        with joined("abc", 1) as session:
            victim.kill()
            with joined("xyz"):
                assert sorted(os.listdir(session.path)) == ["0.json", "1.json"]

            session.close([0])

    def test_what_was_killed_while_joining_goes_and_what_is_not_ours_stays(self, base):
        os.mkdir(base, 0o700)
        os.mkdir(os.path.join(base, "abc"))
        for name in ("." + "a1" * 16, "notes", "x.json"):
            with open(os.path.join(base, name), "w") as file:
                file.write("{}")

        os.mkdir(os.path.join(base, "kept"))
        with open(os.path.join(base, "kept", "notes"), "w") as file:
            file.write("not ours")

        with joined("xyz"):
            assert sorted(os.listdir(base)) == ["kept", "notes", "x.json", "xyz"]

        for name in ("notes", "x.json", "kept/notes"):
            os.unlink(os.path.join(base, name))

    def test_one_process_of_a_session_does_it_and_looks_at_few(self, base, monkeypatch):
        os.mkdir(base, 0o700)
        for number in range(3 * directory.LOOKS):
            os.mkdir(os.path.join(base, f"dead{number}"))

        with joined("xyz", 1):
            assert len(os.listdir(base)) == 3 * directory.LOOKS + 1

        for left in (2 * directory.LOOKS, directory.LOOKS, 0):
            with joined("xyz", 0):
                assert len(os.listdir(base)) == left + 1

    def test_folder_that_can_not_be_looked_through_is_no_error(self, base, monkeypatch):
        os.mkdir(base, 0o700)
        os.mkdir(os.path.join(base, "abc"))

        def refuse(path):
            raise PermissionError(errno.EACCES, "no", path)

        monkeypatch.setattr(os, "rmdir", refuse)
        with joined("xyz") as session:
            assert sorted(os.listdir(base)) == ["abc", "xyz"]

        monkeypatch.undo()
        os.rmdir(session.path)
        os.rmdir(session.path.replace("xyz", "abc"))
