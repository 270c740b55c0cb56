"""The formulas of speed, in tools/formulas, against simulations and known values."""

import math
import re
import sys
from urllib.parse import parse_qsl

import pytest

from tools.formulas import calculator, scaling
from tools.steps import ROOT


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
    without_latency = scaling.H100._replace(nvlink_latency=0.0, network_latency=0.0)
    assert scaling.efficiency(without_latency, 2048, 8e9, 4e6, hsdp=False) > 0.97
    simple = scaling.H100._replace(nvlink_latency=3.4e-6, network_latency=14e-6, tree_latency=14e-6)
    hsdp, fsdp = (scaling.efficiency(simple, 2048, 8e9, 4e6, hsdp) for hsdp in (True, False))
    assert hsdp == pytest.approx(0.93, abs=0.005)
    assert fsdp == pytest.approx(0.20, abs=0.005)


def test_slower_rank_is_measured(shell):
    (shell.folder / "measure.py").write_text("""import os, time, torch.distributed as dist
from bench.measure import median_time
dist.init_process_group("gloo")
print(median_time(lambda: time.sleep(0.1 * int(os.environ["RANK"])), 3) > 0.1)""")
    assert shell.ranks(f"{shell.folder}/measure.py", 2).succeeds().count("True") == 2


def test_slowest_of_two():
    """The mean of the larger of two normal values is 1 / sqrt(pi) standard deviations higher."""
    slowdown = scaling.straggling(2, 0.1, trials=100_000)
    assert slowdown == pytest.approx(1 + 0.1 / math.sqrt(math.pi), abs=0.001)


def test_best_interval():
    """In the simulation, longer and shorter intervals lose more."""
    best = scaling.best_interval(save=30, failure_interval=36_000)
    lost = [scaling.lost_time(best * factor, 30, 300, 36_000, 20_000) for factor in (0.4, 1, 2.5)]
    assert lost[1] < min(lost[0], lost[2])


def run_calculator(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["calculator.py", *arguments.split()])
    calculator.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpus 8", "the following arguments are required: --params"),
        ("--params 8e9 --gpus 0", "all numbers must be 1 or more"),
        ("--params nan", "all numbers must be 1 or more"),
        ("--params 8e9 --n_layer 0", "all numbers must be 1 or more"),
        ("--params 8e9 --gpu_memory 40", "--gpu_memory is in bytes, such as 80e9"),
        ("--params 8e9 --gpus 12 --compile", None),
        ("--params 8e9 --gpus 12 --tp_size 8", "--tp_size must divide --gpus and the 8 GPUs of"),
        ("--params 8e9 --gpus 12 --tp_size 3", "--tp_size must divide --gpus and the 8 GPUs of"),
        ("--params 1e7", "the embedding and the head alone have --params: lower --vocab_size"),
    ],
)
def test_arguments_of_the_calculator(arguments, message, monkeypatch, capsys):
    if message is None:
        return run_calculator(arguments, monkeypatch)
    with pytest.raises(SystemExit) as exit:
        run_calculator(arguments, monkeypatch)
    assert exit.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err.splitlines()[-1]


def test_calculator_leaves_a_tenth(monkeypatch, capsys):
    """With a peak of 52.8 GB."""
    for gpu_memory, fits in [(58e9, "no"), (59e9, "yes")]:
        run_calculator(f"--params 8e9 --gpus 64 --gpu_memory {gpu_memory}", monkeypatch)
        assert re.search(rf"^FSDP  .* 52.8 +{fits}$", capsys.readouterr().out, re.M)


def test_worked_questions(monkeypatch, capsys):
    """Each number of an answer in docs/choose.md is one of the calculator's, for its links."""
    text = (ROOT / "docs" / "choose.md").read_text()
    answers = text.split("### Two questions")[1].split("\n## ")[0].split("<details")[1:]
    assert len(answers) == 2
    for answer in answers:
        for query in re.findall(r"\.md\?([\w=&]+)", answer):
            values = {"gpu_memory": 80, "context": 8192, "loss_chunks": 1} | dict(parse_qsl(query))
            values |= {name: f"{values[name]}e9" for name in ("params", "gpu_memory")}
            options = [f"--{name} {value}" for name, value in values.items() if value != "yes"]
            options += ["--compile"] * ("compile" in values)
            run_calculator(" ".join(options), monkeypatch)
        calculated = capsys.readouterr().out.split()
        claimed = re.findall(r"(\d+\.\d)\s+GB", answer) + re.findall(r"(\S+)\s+tokens/s", answer)
        assert claimed and set(claimed) <= set(calculated), (answer, calculated)


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
