"""PyTorch's own tests of c10d backends, on any backend; the ranks are processes on the CPU. `make upstream` runs it.

    python tests/upstream/run.py --backend samedevice --world-size 3

The suite (``torch.testing._internal.distributed.distributed_test``) comes with torch. Which of its tests apply to a
backend it decides by name, from a list of the built-in ones; a backend that it has never heard of skips much. So it
is imported under the name of Gloo, the built-in backend for the CPU, and then run on the backend that was asked for.
What Gloo skips because it lacks a feature is run on every other backend.

Needs what tests/upstream/requirements.txt names. Ends with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
import unittest
import warnings
from collections import Counter
from typing import IO

COLLECTIVES = (
    "all_reduce all_gather reduce_scatter barrier broadcast scatter gather all_to_all send_recv get_rank".split()
)
"""A test is run if its name has one of these in it."""

LACKING = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")
"""The reasons for which Gloo skips what it has no feature for. All others are about GPUs, or other backends' own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="samedevice")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--match", default="|".join(COLLECTIVES), help="a regular expression, searched for in names")
    parser.add_argument("--json", action="store_true", help="outcomes by test, as JSON, instead of text")
    args = parser.parse_args()
    report = quiet()
    suite = load(args.backend, args.world_size)
    names = [name for name in unittest.defaultTestLoader.getTestCaseNames(suite) if re.search(args.match, name)]
    outcomes = {}
    for name in names:
        started = time.monotonic()
        outcome, why = run(suite(name))
        outcomes[name] = {"outcome": outcome, "why": why}
        if not args.json:
            print(f"{outcome:7} {name} {time.monotonic() - started:.1f} s", why, file=report)

    counts = Counter(entry["outcome"] for entry in outcomes.values())
    if args.json:
        print(json.dumps(outcomes), file=report)
    else:
        print(
            f"{args.backend}, {args.world_size} ranks: of {len(names)} tests "
            f"{counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed",
            file=report,
        )

    return 1 if counts["failed"] or not names else 0


def quiet() -> IO[str]:
    """Standard output, for the report alone."""
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.INFO)
    return report


class Name(str):
    """A backend's name. Where a test asks in its middle whether it runs on Gloo, for what Gloo can do, it does."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str, world_size: int) -> type[unittest.TestCase]:
    """The suite as a class of tests on ``backend``. Ranks are forked: to import torch anew for each takes longer."""
    sys.argv[1:] = []  # the suite reads them as well
    warnings.simplefilter("ignore")
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world_size), TORCH_TEST_WITH_SLOW="0", OMP_NUM_THREADS="1")

    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import DistTestCases
    from torch.testing._internal.distributed import distributed_test

    if not dist.is_backend_available(backend):
        import dtorch_samedevice_group  # noqa: F401 - registers it; torch 2.14 would find it

    torch.set_num_threads(1)
    os.environ["BACKEND"], distributed_test.BACKEND = backend, Name(backend)
    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    if backend != "gloo":
        for test in vars(distributed_test.DistributedTest._DistTestBase).values():
            if getattr(test, "__unittest_skip_why__", None) in LACKING:
                test.__unittest_skip__ = False

    return Suite


def run(test: unittest.TestCase) -> tuple[str, str]:
    """How it ended, and why."""
    result = unittest.TestResult()
    errors, said = os.dup(2), ""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            test.run(result)
        finally:
            os.dup2(errors, 2)
            os.close(errors)
            file.seek(0)
            said = file.read().decode(errors="replace")

    for _, text in result.failures + result.errors:
        return "failed", "\n".join([text, *(line for line in said.splitlines() if not line.startswith("USDT:"))])

    for _, why in result.skipped:
        return "skipped", why

    return "passed", ""


if __name__ == "__main__":
    sys.exit(main())
