"""dtorch run: exit handlers of ranks that are processes have the script's process group."""

from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import script_runs

run = script_runs.run

PROCESSES = ("--ranks-as", "processes")

BEGIN = f"""
import atexit, os, sys
{script_runs.BEGIN}
folder = sys.argv[1]

def note(text):
    with open(os.path.join(folder, str(rank)), "a") as file:
        file.write(f"{{text}}\\n")

def bye():
    x = torch.tensor([1.0 + rank])
    dist.all_reduce(x)
    note(f"{{x.item()}} of {{os.environ['RANK']}}")

dist.init_process_group("gloo")
"""


@pytest.fixture
def noted(run, tmp_path):
    """Run a script, and read what its exit handlers have noted, by rank."""

    def noted(body, status=0):
        folder = tmp_path / "notes"
        folder.mkdir()
        got, _, err = run(body, *PROCESSES, begin=BEGIN, arguments=(str(folder),))
        assert got == status, err
        return {int(file.name): file.read_text().splitlines() for file in folder.iterdir()}, err

    return noted


def test_they_call_collectives_in_the_order_of_atexit(noted):
    body = """
    atexit.register(lambda: note(dist.is_initialized()))
    atexit.register(dist.destroy_process_group)
    atexit.register(bye)
    """
    assert noted(body)[0] == {rank: [f"3.0 of {rank}", "False"] for rank in range(2)}


def test_a_group_that_is_left_open_is_ended_in_good_order(noted):
    body = """
    half = dist.new_group([0, 1])
    atexit.register(bye)
    atexit.register(lambda: dist.barrier(half))
    """
    notes, err = noted(body)
    assert notes == {rank: [f"3.0 of {rank}"] for rank in range(2)}
    assert [line for line in err if "atexit" in line or "Error" in line] == []


def test_one_that_waits_for_a_script_which_goes_on(noted):
    body = """
    if rank == 0:
        atexit.register(bye)  # while rank 1 is still in its script
    else:
        x = torch.zeros(1)
        dist.recv(x, 0)
        bye()

    if rank == 0:
        atexit.register(lambda: dist.send(torch.ones(1), 1))
    """
    assert noted(body)[0] == {rank: [f"3.0 of {rank}"] for rank in range(2)}


def test_one_that_waits_for_a_rank_which_fails_is_told(noted):
    body = """
    def waits():
        try:
            dist.barrier()
        except RuntimeError as error:
            note(type(error).__name__)
            note("no such luck" in str(error))

    if rank == 0:
        atexit.register(waits)
        atexit.register(lambda: dist.send(torch.ones(1), 1))
    else:
        dist.recv(torch.zeros(1), 0)
        raise ValueError("no such luck")
    """
    notes, err = noted(body, status=1)
    assert notes == {0: ["PeerLostError", "True"]}
    assert any("rank 1 of 2 failed with ValueError: no such luck" in line for line in err)


def test_after_a_failure_nothing_waits(noted):
    notes, _ = noted("atexit.register(lambda: note(rank)); dist.barrier(); raise ValueError('at once')", status=1)
    assert notes == {0: ["0"], 1: ["1"]}
