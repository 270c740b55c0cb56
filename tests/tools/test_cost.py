"""The formulas of speed, in tools/formulas, against simulations and known values."""

import math
import sys

import pytest
import torch.distributed as dist

from bench.measure import median_time
from tools.formulas import calculator, scaling


def test_ring():
    """Each of N sends 2 (N - 1) chunks, an N-th of the whole, one after the other."""
    assert scaling.all_reduce(8, 1.0, 0.0, 1.0) == pytest.approx(14 / 8)
    assert scaling.all_reduce(8, 0.0, 1.0, 1.0) == 14


def test_latency_limits_fsdp_over_all_gpus():
    """As docs/large_clusters.md says: Llama 3 8B on 2,048 GPUs, with 4 million tokens per step."""
    assert 3 * scaling.ring(scaling.H100, 2048, 0.0) == pytest.approx(0.44, abs=0.005)
    hsdp, fsdp = (scaling.efficiency(scaling.H100, 2048, 8e9, 4e6, hsdp) for hsdp in (True, False))
    assert hsdp == pytest.approx(0.94, abs=0.005)
    assert fsdp == pytest.approx(0.38, abs=0.005)


def test_slower_rank_is_measured(monkeypatch):
    def gather(results, seconds):
        results[:] = [seconds, seconds + 1]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    assert median_time(lambda: None, 3) > 1


def test_slowest_of_two():
    """The mean of the larger of two normal values is 1 / sqrt(pi) standard deviations higher."""
    slowdown = scaling.straggling(2, 0.1, trials=100_000)
    assert slowdown == pytest.approx(1 + 0.1 / math.sqrt(math.pi), abs=0.001)


def test_best_interval():
    """In the simulation, longer and shorter intervals lose more."""
    best = scaling.best_interval(save=30, failure_interval=36_000)
    lost = [scaling.lost_time(best * factor, 30, 300, 36_000, 20_000) for factor in (0.4, 1, 2.5)]
    assert lost[1] < min(lost[0], lost[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--params nan", "all numbers must be 1 or more"),
        ("--params 8e9 --gpu_memory 40", "--gpu_memory is in bytes, such as 80e9"),
        ("--params 8e9 --gpus 12 --tp_size 3", "--tp_size must divide --gpus and the 8 GPUs of"),
        ("--params 8e9 --pp_size 3", "--pp_size times --tp_size must divide --gpus"),
        ("--params 1e7", "the embedding and the head alone have --params: lower --vocab_size"),
    ],
)
def test_arguments_of_the_calculator(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calculator.py", *arguments.split()])
    with pytest.raises(SystemExit):
        calculator.main()
    assert f"error: {message}" in capsys.readouterr().err


def test_pipeline_bubble():
    """A step takes m + p - 1 times what a micro-batch does (GPipe, arXiv 1811.06965, section 2.3).

    On GPUs whose links take no time.
    """
    links = ("nvlink_bandwidth", "network_bandwidth")
    latencies = ("nvlink_latency", "network_latency", "tree_latency")
    hardware = scaling.H100._replace(
        **dict.fromkeys(links, math.inf), **dict.fromkeys(latencies, 0)
    )
    model = calculator.gpt_of_size(8e9, 128256, 8192)
    way = calculator.Way("", 4, pp=4)
    seconds = [calculator.step_of(way, hardware, model, 4, 1, m)[1] for m in (1, 2, 8)]
    assert seconds == pytest.approx([seconds[0] * (m + 3) / 4 for m in (1, 2, 8)])
