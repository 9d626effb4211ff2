"""spawn(rng="per-rank"): each rank that is a thread draws as if it were a process of its own."""

import importlib
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from dtorch_core import RankFailedError, UnsupportedOperationError, spawn
from dtorch_core._thread_ranks import random as _rank_random

LIMIT = 30.0


def run(fn, world_size=4, **named):
    return spawn(fn, world_size, rng="per-rank", timeout=LIMIT, **named)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """This file as a module that other processes can import."""
    (tmp_path / "rank_random_ranks.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("rank_random_ranks")
    sys.modules.pop("rank_random_ranks")


def draw(seed):
    """Something from everything that draws, by name."""
    torch.manual_seed(seed)
    drawn = {
        "rand": torch.rand(5),
        "randn": torch.randn(3, 3),
        "randint": torch.randint(100, (7,)),
        "randperm": torch.randperm(9),
        "normal": torch.normal(torch.zeros(4), torch.ones(4)),
        "normal of numbers": torch.normal(0.0, 1.0, (3,)),
        "bernoulli": torch.bernoulli(torch.full((6,), 0.5)),
        "multinomial": torch.multinomial(torch.ones(8), 4),
        "poisson": torch.poisson(torch.full((4,), 3.0)),
        "like": torch.cat([torch.rand_like(torch.empty(3)), torch.randn_like(torch.empty(3))]),
        "geometric_": torch.empty(4).geometric_(0.5),
        "bernoulli_": torch.empty(4).bernoulli_(0.3),
        "default generator": torch.rand(3, generator=torch.default_generator),
        "own generator": torch.rand(3, generator=torch.Generator().manual_seed(4)),
    }
    for name in ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "random_"):
        drawn[name] = getattr(torch.empty(4), name)()

    drawn["embedding"] = nn.Embedding(5, 3).weight.detach()
    drawn["convolution"] = nn.Conv2d(1, 2, 3).weight.detach()
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    drawn["transformer"] = layer(torch.ones(2, 4, 8)).detach()
    drawn["lstm"] = nn.LSTM(4, 4, 2, dropout=0.5)(torch.ones(3, 2, 4))[0].detach()
    drawn["truncated"] = nn.init.trunc_normal_(torch.empty(4))
    query = torch.randn(1, 2, 4, 8)
    drawn["attention"] = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.4)
    drawn["rrelu"] = functional.rrelu(torch.randn(6), training=True)
    drawn["alpha dropout"] = functional.alpha_dropout(torch.randn(6), 0.5, True)
    drawn["gumbel"] = functional.gumbel_softmax(torch.randn(5))
    drawn["gamma"] = torch.distributions.Gamma(torch.ones(3), torch.ones(3)).sample()
    drawn["dirichlet"] = torch.distributions.Dirichlet(torch.ones(3)).sample()
    data = torch.utils.data.TensorDataset(torch.arange(20))
    drawn["split"] = torch.tensor(list(torch.utils.data.random_split(data, [15, 5])[0].indices))
    drawn["shuffled"] = torch.cat([batch[0] for batch in torch.utils.data.DataLoader(data, 4, shuffle=True)])
    state = torch.get_rng_state()
    drawn["before"] = torch.rand(3)
    torch.set_rng_state(state)
    drawn["again"] = torch.rand(3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drawn["forked"] = torch.rand(3)

    drawn["after"] = torch.rand(3)
    drawn["seed"] = torch.tensor(torch.initial_seed())
    weight = torch.randn(8, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(
        lambda w: functional.dropout(torch.ones(8) * w, 0.5), weight, use_reentrant=False
    )
    y.sum().backward()
    drawn["repeated in backward"] = torch.cat([y.detach(), weight.grad])
    return drawn


def draw_as(ctx):
    return draw(100 + ctx.rank)


class TestPerRank:
    def test_ranks_draw_what_a_program_alone_draws(self):
        before = torch.get_rng_state()
        results = run(draw_as)
        assert torch.equal(torch.get_rng_state(), before)
        for rank, drawn in enumerate(results):
            expected = draw(100 + rank)
            assert [name for name in expected if not torch.equal(drawn[name], expected[name])] == []

    def test_ranks_draw_what_processes_draw(self, elsewhere):
        threads = run(draw_as, 2)
        processes = spawn(elsewhere.draw_as, 2, ranks_as="processes", rng="per-rank", timeout=100)
        for drawn, expected in zip(threads, processes, strict=True):
            assert [name for name in expected if not torch.equal(drawn[name], expected[name])] == []

    def test_ranks_of_one_process_draw_apart(self, elsewhere):
        results = spawn(elsewhere.draw_as, 2, ranks_as="processes", threads_per_process=2, rng="per-rank", timeout=100)
        for rank, drawn in enumerate(results):
            assert torch.equal(drawn["rand"], draw(100 + rank)["rand"])

    def test_ranks_that_draw_in_turns_do_not_disturb_each_other(self):
        turn = threading.Barrier(3, timeout=LIMIT)

        def rank(ctx):
            torch.manual_seed(7)
            drawn = []
            for _ in range(20):
                turn.wait()
                drawn.append(torch.rand(2))

            return torch.cat(drawn)

        first, second, third = run(rank, 3)
        torch.manual_seed(7)
        assert torch.equal(first, torch.cat([torch.rand(2) for _ in range(20)]))
        assert torch.equal(first, second) and torch.equal(first, third)

    def test_ranks_without_a_seed_differ(self):
        first, second = run(lambda ctx: torch.randint(2**60, (4,)), 2)
        assert not torch.equal(first, second)

    def test_a_thread_that_a_rank_starts_draws_from_the_ranks(self):
        def rank(ctx):
            torch.manual_seed(ctx.rank)
            drawn = []
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
            thread.start()
            thread.join(LIMIT)
            return torch.cat([*drawn, torch.rand(3)])

        for number, drawn in enumerate(run(rank)):
            torch.manual_seed(number)
            assert torch.equal(drawn, torch.cat([torch.rand(3), torch.rand(3)]))

    @pytest.mark.cuda
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    def test_ranks_draw_on_a_gpu_what_a_program_alone_draws(self):
        def drawn_on_gpu(seed):
            torch.manual_seed(seed)
            x = torch.ones(64, device="cuda")
            query = torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.float16)
            return [
                torch.rand(5, device="cuda"),
                functional.dropout(x, 0.5),
                functional.scaled_dot_product_attention(query, query, query, dropout_p=0.3),
                nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, device="cuda")(x.view(2, 4, 8)).detach(),
                torch.randperm(100_000, device="cuda"),
                torch.randn(4, device="cuda"),
                torch.cuda.get_rng_state(),
                torch.rand(3),
            ]

        before = torch.cuda.get_rng_state()
        results = run(lambda ctx: drawn_on_gpu(ctx.rank), devices="cuda:0")
        assert torch.equal(torch.cuda.get_rng_state(), before)
        for rank, drawn in enumerate(results):
            for own, expected in zip(drawn, drawn_on_gpu(rank), strict=True):
                assert torch.equal(own, expected)


class TestOutside:
    def test_other_threads_draw_from_the_process_meanwhile(self):
        came, drew = threading.Barrier(3, timeout=LIMIT), threading.Barrier(3, timeout=LIMIT)

        def rank(ctx):
            torch.manual_seed(5)
            came.wait()
            drew.wait()
            return torch.rand(3)

        torch.manual_seed(1)
        expected = torch.rand(6)
        torch.manual_seed(1)
        results = []
        thread = threading.Thread(target=lambda: results.extend(run(rank, 2)))
        thread.start()
        came.wait()
        drawn = torch.rand(3), torch.empty(3).uniform_()
        drew.wait()
        thread.join(LIMIT)
        assert torch.equal(torch.cat(drawn), expected)
        torch.manual_seed(5)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], torch.rand(3))

    @pytest.mark.parametrize("fails", [False, True])
    def test_torch_is_as_before_after_a_run(self, fails):
        def rank(ctx):
            if fails:
                raise ValueError("no")

        kernel = torch.library.get_kernel("aten::uniform_", "CPU")
        default, start = torch.random.default_generator, threading.Thread.start
        if fails:
            with pytest.raises(RankFailedError):
                run(rank, 2)
        else:
            run(rank, 2)

        assert torch.random.default_generator is default and threading.Thread.start is start
        assert torch.library._impls.isdisjoint({"aten/uniform_/CPU", "aten/random_.from/CPU"})
        torch.manual_seed(2)
        expected = torch.rand(3)
        torch.manual_seed(2)
        keys = torch._C._dispatch_keys(expected)
        assert torch.equal(kernel.call_boxed(keys, torch.empty(3)), expected)

    def test_shared_random_numbers_touch_nothing(self):
        seen = spawn(lambda ctx: (torch.random.default_generator is torch.default_generator, threading.Thread.start), 2)
        assert seen == [(True, threading.Thread.start)] * 2

    def test_what_torch_lacks_is_said(self, monkeypatch):
        monkeypatch.setattr(_rank_random, "MISSING", ["torch.library has no get_kernel"])
        with pytest.raises(UnsupportedOperationError, match="rng='per-rank': .* threads: torch.library has no"):
            run(lambda ctx: None, 2)

    def test_nothing_is_missed_in_this_torch(self):
        assert _rank_random.MISSING == []
