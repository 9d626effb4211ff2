"""Sessions of this user: live ones are left alone, dead ones are found and removed, and other people kept out."""

import contextlib
import errno
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading

import pytest
from dtorch_file_store import directory, headroom, reach
from dtorch_file_store.directory import VARIABLE, ProcessInfo, SessionDirectory, clean_dead, report, sessions

from dtorch_core import DtorchError, _catalogue
from dtorch_core.cli import main

LIMIT = 30.0


@pytest.fixture
def base(monkeypatch, tmp_path):
    """A short folder for sessions, which is the only one. (``tmp_path`` is made before the place for such changes.)"""
    with tempfile.TemporaryDirectory(prefix="dt") as folder:
        monkeypatch.setenv(VARIABLE, os.path.join(folder, "s"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", "")
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield os.path.join(folder, "s")


@contextlib.contextmanager
def joined(token, index=0, name="numbers"):
    directory = SessionDirectory(token, index, about(name))
    try:
        yield directory
    finally:
        directory.close()


def about(name="numbers"):
    return {"name": name, "ranks": [0, 1], "world_size": 2}


class Other:
    """Another process that has joined a session, and waits to be told to leave it."""

    def __init__(self, token, index):
        code = (
            "import sys\n"
            "from dtorch_file_store.directory import SessionDirectory\n"
            f"directory = SessionDirectory({token!r}, {index}, {about()!r})\n"
            "print('in', flush=True)\n"
            "sys.stdin.readline()\n"
            "directory.close()\n"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", code], **pipes)
        readable, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        assert readable and self.process.stdout.readline() == "in\n"
        self.pid = self.process.pid

    def leave(self):
        self.process.communicate("\n", timeout=LIMIT)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LIMIT)


@pytest.fixture
def other():
    """Makes other processes; none of them outlives the test."""
    made = []

    def join(token, index):
        made.append(Other(token, index))
        return made[-1]

    yield join
    for each in made:
        if each.process.returncode is None:
            each.kill()


class TestFolder:
    def test_is_closed_to_others(self, base):
        with joined("abc") as session:
            for path in (base, session.path):
                assert stat.S_IMODE(os.stat(path).st_mode) == 0o700

            assert session.path == os.path.join(base, "abc")
            assert stat.S_IMODE(os.stat(os.path.join(session.path, "0.json")).st_mode) == 0o600

    def test_file_says_who_is_there(self, base):
        with joined("abc", 3) as session, open(os.path.join(session.path, "3.json")) as file:
            said = json.load(file)

        assert said.pop("started") > 0
        assert said == {"pid": os.getpid(), "name": "numbers", "ranks": [0, 1], "world_size": 2}

    def test_sockets_are_in_it(self, base):
        with joined("abc") as session:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(session.socket_path(0))

            assert session.socket_path(7) == os.path.join(session.path, "7.sock")

        assert not os.path.exists(session.path)

    @pytest.mark.parametrize("token", ["", "..", "a/b", "a.b", "x" * 65, "a\n"])
    def test_token_that_is_no_name_is_refused(self, base, token):
        with pytest.raises(DtorchError, match="is no name of a session"):
            SessionDirectory(token, 0, about())

        assert not os.path.exists(base)

    def test_place_comes_from_the_environment(self, base, monkeypatch, tmp_path):
        tmp_path.chmod(0o700)
        monkeypatch.setenv(VARIABLE, "")
        assert directory._base() == os.path.join(tempfile.gettempdir(), f"dtorch-{os.geteuid()}")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert directory._base() == str(tmp_path / "dtorch")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
        assert directory._base() == os.path.join(tempfile.gettempdir(), f"dtorch-{os.geteuid()}")

    def test_runtime_folder_of_another_user_is_not_taken(self, base, monkeypatch, tmp_path):
        monkeypatch.setenv(VARIABLE, "")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert str(tmp_path) not in directory._base()


class TestClose:
    def test_last_process_removes_the_folder(self, base, other):
        first, second = other("abc", 0), SessionDirectory("abc", 1, about())
        second.close()
        assert os.listdir(second.path) == ["0.json"]
        first.leave()
        assert os.listdir(base) == []

    def test_files_of_the_dead_go_with_the_survivors(self, base, other):
        victim, survivor = other("abc", 0), SessionDirectory("abc", 1, about())
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(survivor.socket_path(0))

        victim.kill()
        survivor.close([0])
        assert os.listdir(base) == []

    def test_process_that_is_alive_is_left_though_called_dead(self, base, other):
        slow, session = other("abc", 0), SessionDirectory("abc", 1, about())
        session.close([0, 5])
        assert os.listdir(session.path) == ["0.json"]
        slow.leave()

    def test_twice_is_once(self, base):
        session = SessionDirectory("abc", 0, about())
        session.close()
        with joined("abc") as again:
            session.close()
            assert os.listdir(again.path) == ["0.json"]

    def test_thousand_sessions_leave_nothing(self, base):
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1000):
            SessionDirectory(f"s{number}", 0, about()).close()

        assert os.listdir(base) == []
        assert len(os.listdir("/proc/self/fd")) == before


class TestSessions:
    def test_live_and_dead_processes_are_told_apart(self, base, other):
        victim = other("abc", 0)
        with joined("abc", 1), joined("xyz", 0, name="other"):
            victim.kill()
            abc, xyz = sessions()
            assert (abc.token, abc.name, abc.world_size, abc.alive) == ("abc", "numbers", 2, True)
            assert abc.processes == (ProcessInfo(0, victim.pid, False), ProcessInfo(1, os.getpid(), True))
            assert (xyz.name, xyz.processes) == ("other", (ProcessInfo(0, os.getpid(), True),))

        assert str(abc) == f"numbers, 2 ranks: pid {victim.pid} (dead), pid {os.getpid()}"

    def test_none_where_nothing_was_opened(self, base):
        assert sessions() == clean_dead() == []
        assert not os.path.exists(base)

    def test_damaged_file_is_a_process_all_the_same(self, base):
        with joined("abc") as session:
            for text in ("", "{", "[1]", '{"pid": "x", "world_size": null}'):
                with open(os.path.join(session.path, "0.json"), "w") as file:
                    file.write(text)

                (found,) = sessions()
                assert (found.alive, found.world_size, found.processes[0].pid) == (True, 0, 0)


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


class TestRefusals:
    def test_folder_of_another_user(self, base, monkeypatch):
        os.mkdir(base, 0o700)
        owner, other = os.stat(base).st_uid, os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(DtorchError, match=f"belongs to the user with id {owner}, .* is of {other}: set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

        assert os.listdir(base) == [] and sessions() == []
        with pytest.raises(DtorchError, match="belongs to the user"):
            report()

    def test_symbolic_link(self, base, tmp_path):
        tmp_path.chmod(0o700)
        os.symlink(tmp_path, base)
        with pytest.raises(DtorchError, match=f"{base}, is a symbolic link: remove it, or set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

        assert os.listdir(tmp_path) == []

    def test_folder_that_others_may_write_to(self, base):
        os.mkdir(base)
        os.chmod(base, 0o770)
        with pytest.raises(DtorchError, match=r"others may write to .*\(mode 770\): chmod 700 it, or set "):
            SessionDirectory("abc", 0, about())

    def test_path_too_long_for_a_socket(self, base, monkeypatch):
        deep = os.path.join(os.path.dirname(base), "d" * 100)
        monkeypatch.setenv(VARIABLE, deep)
        with pytest.raises(DtorchError, match=f"has at most 107: set {VARIABLE} to a folder with a shorter name"):
            SessionDirectory("abc", 0, about())

        assert not os.path.exists(deep)

    def test_longest_path_that_is_allowed_can_be_bound(self, base, monkeypatch):
        folder = os.path.dirname(base)
        deep = os.path.join(folder, "d" * (107 - len(folder) - len("//abc/0.sock")))
        monkeypatch.setenv(VARIABLE, deep)
        with joined("abc") as session, socket.socket(socket.AF_UNIX) as listener:
            assert len(session.socket_path(0)) == 107
            listener.bind(session.socket_path(0))
            with pytest.raises(DtorchError, match="has 108 bytes"):
                session.socket_path(10)

    def test_place_that_can_not_be_made(self, base, monkeypatch):
        with open(base, "w") as file:
            file.write("a file")

        with pytest.raises(DtorchError, match=f"can't be made or written: .*; set {VARIABLE} to a folder on a disk"):
            SessionDirectory("abc", 0, about())

        monkeypatch.setenv(VARIABLE, "/proc/dtorch")  # nobody may write there, not even root
        with pytest.raises(DtorchError, match=f"/proc/dtorch, can't be made or written: .*; set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

    @pytest.mark.parametrize("call", ["open", "write", "rename"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
    def test_full_or_read_only_disk(self, base, monkeypatch, call, number):
        def refuse(*args):
            raise OSError(number, os.strerror(number))

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(DtorchError, match=f"can't be made or written: {os.strerror(number)}; set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

        monkeypatch.undo()
        assert len(os.listdir("/proc/self/fd")) == before
        assert [name for name in os.listdir(base) if name.startswith(".")] == []


class TestReport:
    def test_doctor_knows_the_variables(self):
        known = {name for name, text in _catalogue.VARIABLES.items() if "dtorch-file-store" in text}
        assert {VARIABLE, headroom.VARIABLE, reach.VARIABLE} == known

    def test_doctor_shows_it(self, base, other, capsys):
        victim = other("abc", 0)
        victim.kill()
        assert main(["doctor", "--json"]) == 0
        (lines,) = [v for label, v in json.loads(capsys.readouterr().out)["reports"].items() if "file-store" in label]
        assert lines == [f"removed: session numbers, 2 ranks: pid {victim.pid} (dead)"]
        assert os.listdir(base) == []

    def test_doctor_names_a_folder_of_another_user(self, base, monkeypatch, capsys):
        os.mkdir(base, 0o700)
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        assert main(["doctor"]) == 1
        assert f"DtorchError: the folder for sessions, {base}, belongs to the user" in capsys.readouterr().out

    def test_doctor_names_a_folder_that_can_not_be_made(self, monkeypatch, capsys):
        monkeypatch.setenv(VARIABLE, "/proc/nope")
        assert main(["doctor"]) == 1
        assert "DtorchError: the folder for sessions, /proc/nope, can't be made or written" in capsys.readouterr().out

    def test_says_where_there_is_none(self, base):
        (line,) = report()
        assert line.startswith(f"no session of this user in {base} or ")

    def test_shows_the_live_and_removes_the_dead(self, base, other):
        victim = other("abc", 0)
        victim.kill()
        with joined("xyz", 1, name="other"):
            assert report() == [
                f"removed: session numbers, 2 ranks: pid {victim.pid} (dead)",
                f"live: session other, 2 ranks: pid {os.getpid()}",
            ]
            assert report() == [f"live: session other, 2 ranks: pid {os.getpid()}"]
