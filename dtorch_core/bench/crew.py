"""Rank processes that stay: each is pinned to a core, and answers what the main process asks of all of them at once."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dtorch_core._spawn.started_process import no_interrupt
from dtorch_core._text import describe_error
from dtorch_core.bench.interrupts import after_this
from dtorch_core.bench.team import PATIENCE, pin
from dtorch_core.errors import PeerLostError

ENDING = 5.0
"""Seconds between the end of what a process has open and its own, and more than that."""

Timed = Callable[[int], float]
"""Seconds for one call, from so many calls in a row."""

Serve = Callable[..., None]
"""What a process does: of its rank, the world size, the path of a file to meet at, where it is asked, and more."""


class RefusedError(RuntimeError):
    """A rank could not do what it was asked for; the others have answered too, so that the crew is of use still."""


class Crew:
    """The processes of one world. They sleep while others are measured."""

    def __init__(self, ranks: int, serve: Serve, *more: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self._folder.name) / "meeting")
        self._pipes, self._processes = [], []
        with after_this(), no_interrupt():  # a terminal sends it to all; we end them
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                process = context.Process(target=_run, args=(serve, rank, ranks, meeting, theirs, more), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def ask(self, *question: object) -> list[float]:
        """Every rank's answer.

        :raises RefusedError: if a rank raised something.
        :raises PeerLostError: if a rank's process has ended.
        :raises TimeoutError: if a rank says nothing.
        """
        with after_this():
            try:
                return self._answers(question)
            except KeyboardInterrupt:  # the second: ranks may wait for each other
                for process in self._processes:
                    process.terminate()

                raise

    def _answers(self, question: tuple[object, ...]) -> list[float]:
        for rank, pipe in enumerate(self._pipes):
            with self._living(rank):
                pipe.send(question)

        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"rank {rank}: no answer to {question}")

            with self._living(rank):
                answers.append(pipe.recv())

        refusals = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if refusals:
            raise RefusedError("; ".join(refusals))

        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(ConnectionError):  # its process has ended
                pipe.send(("end",))

            pipe.close()

        for process in self._processes:
            process.join(PATIENCE)

        self._folder.cleanup()

    @contextmanager
    def _living(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            process = self._processes[rank]
            process.join(ENDING)
            raise PeerLostError(
                f"rank {rank} (pid {process.pid}) ended while it was measured, with exit code {process.exitcode}"
            ) from error


@dataclass(frozen=True, slots=True)
class CrewSubject:
    """One thing that a crew does; its time is that of the slowest rank."""

    name: str
    crew: Crew

    @classmethod
    def of(cls, name: str, crew: Crew, *what: object) -> CrewSubject:
        """Let the crew prepare ``what``; it forgets what it had under this name."""
        crew.ask("prepare", name, *what)
        return cls(name, crew)

    def time(self, count: int) -> float:
        return max(self.crew.ask("time", self.name, count))


def answer(pipe: Connection, prepare: Callable[..., Timed]) -> None:
    """Serve until the crew is closed.

    :param prepare: makes what is timed.
    """
    prepared: dict[str, Timed] = {}
    while (question := pipe.recv())[0] != "end":
        kind, name, *rest = question
        try:
            if kind == "prepare":
                prepared.pop(name, None)  # its tensors
                prepared[name] = prepare(*rest)
                pipe.send(0.0)
            else:
                pipe.send(prepared[name](*rest))
        except Exception as error:
            pipe.send(describe_error(error))


def _run(serve: Serve, rank: int, ranks: int, meeting: str, pipe: Connection, more: tuple[object, ...]) -> None:
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    pin(rank)
    serve(rank, ranks, meeting, pipe, *more)
