"""Sessions of this user: what a process puts into its folder, takes away again, and shows of the others."""

import json
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from dtorch_file_store import headroom, places, reach
from dtorch_file_store.directory import ProcessInfo, SessionDirectory, clean_dead, report, sessions
from dtorch_file_store.places import VARIABLE

from dtorch_core import DtorchError
from dtorch_core._selection import catalogue
from dtorch_core.cli import main

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_directory_others")
    import file_directory_others as others
    from file_directory_others import about, joined

base, other = others.base, others.other  # fixtures


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
        assert places.place_for_new() == os.path.join(tempfile.gettempdir(), f"dtorch-{os.geteuid()}")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert places.place_for_new() == str(tmp_path / "dtorch")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
        assert places.place_for_new() == os.path.join(tempfile.gettempdir(), f"dtorch-{os.geteuid()}")

    def test_runtime_folder_of_another_user_is_not_taken(self, base, monkeypatch, tmp_path):
        monkeypatch.setenv(VARIABLE, "")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert str(tmp_path) not in places.place_for_new()


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


class TestReport:
    def test_doctor_knows_the_variables(self):
        known = {name for name, text in catalogue.VARIABLES.items() if "dtorch-file-store" in text}
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
