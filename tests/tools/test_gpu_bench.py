"""bench/gpu.py, on a small model and the CPU: all but the GPU itself."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import gpt_config
from rankcheck.launch.jobs import pretend_gpus

from bench import gpu, nanogpt_loop
from gpt import pretrain

N_LAYER, N_HEAD, N_EMBD, CONTEXT = 1, 1, 64, 64


def small_model():
    model = pretrain.GPT(gpt_config(N_LAYER, N_HEAD, N_EMBD, CONTEXT))
    model.init_weights(seed=0)
    return model


@pytest.mark.nightly
def test_gpt(tmp_path, monkeypatch):
    """Both loops train on pretended GPUs, with the MFU of their speed; a failure ends its row."""
    variables = pretend_gpus(2)
    variables["PYTHONPATH"] += f":{tmp_path}"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answers = {"get_device_name": "NVIDIA H200", "device_count": 2, "is_available": True}
    answers["is_bf16_supported"] = True
    answers["get_device_properties"] = SimpleNamespace(total_memory=141e9)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **options: answer)
    (tmp_path / "fails.py").write_text('raise RuntimeError("CUDA out of memory. Tried 2 GiB")')
    names = ["fails", "bench.gpu", "bench.nanogpt_loop"]
    settings = {"N_HEAD": N_HEAD, "N_EMBD": N_EMBD, "CONTEXT": CONTEXT, "BATCH_SIZES": [2]}
    settings |= {"EPOCH_S": 0.02, "versions": lambda: "driver 1"}
    settings["VARIANTS"] = {name: name for name in names}
    for name, value in settings.items():
        monkeypatch.setattr(gpu, name, value)
    report = tmp_path / "report.md"
    command = f"gpu.py gpt --layers 1 --peak_tflops 0.01 --report {report}"
    monkeypatch.setattr("sys.argv", command.split())
    gpu.main()
    lines = report.read_text().splitlines()
    assert lines[1].startswith("## gpt: ") and lines[3].endswith(": driver 1")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[7:]]
    assert [row[0] for row in rows] == names
    assert rows[0][2] == "failed: out of memory"
    flops_per_token = small_model().flops_per_token
    for _, batch_size, throughput, mfu, memory in rows[1:]:
        assert (batch_size, memory) == ("2", "0.0 GB")
        expected = 100 * float(throughput.replace(",", "")) * flops_per_token / 0.01e12
        assert float(mfu.rstrip("% ")) == pytest.approx(expected, abs=0.06)


@pytest.mark.nightly
def test_stages(tmp_path, monkeypatch):
    """On three ranks, whose sampler takes a sample twice; another seed is told, and a failure."""
    stage_command = gpu.stage_command

    def with_faults(stage, gpus):
        if stage == "multigpu.py":
            return "python nosuch.py"
        return stage_command(stage, gpus) + " --seed 1" * (stage == "resumable.py")

    monkeypatch.setattr(gpu, "stage_command", with_faults)
    monkeypatch.setattr(gpu, "MANY_EPOCHS", 5)
    results = {row.split("`")[1]: row for row in [*gpu.stage_rows(3, tmp_path)][2:]}
    assert list(results) == gpu.STAGES
    assert "| failed: " in results.pop("multigpu.py")
    assert re.search(r"\| \d\.\d+, not \d", results.pop("resumable.py"))
    assert all(", equal |" in row for row in results.values())


def test_steps_are_those_of_pretrain(tmp_path, monkeypatch):
    """From the same weights and batches, nanoGPT's step has the losses and weights of ours."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)  # without a group
    models = [small_model() for _ in range(2)]
    optimizers = [pretrain.configure_optimizer(model, 1e-3) for model in models]
    trainer = SimpleNamespace(
        model=models[0],
        optimizer=optimizers[0],
        loss_fn=pretrain.next_byte_loss,
        autocast=contextlib.nullcontext(),
        totals=torch.zeros(2),
        recent_totals=torch.zeros(2),
        first_bad_step=torch.tensor(torch.inf),
        samples_run=0,
        train_loader=SimpleNamespace(batch_size=4, dataset=range(20)),
        tokens=0,
        args=SimpleNamespace(skip_steps=[]),
        _steps_done=lambda: 0,
        _learning_rate=lambda: 1e-3,
    )
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    args = SimpleNamespace(batch_size=4, context=CONTEXT)
    for _ in range(5):
        inputs, targets = nanogpt_loop.get_batch(text, args, torch.device("cpu"))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        trainer.totals.zero_()
        pretrain.Trainer._run_batch(trainer, inputs, targets)
        loss = nanogpt_loop.compute_loss(models[1], inputs, targets)
        assert loss.detach() == trainer.totals[0] / len(inputs)
        nanogpt_loop.update(models[1], loss, optimizers[1])
    for weights, expected in zip(*(model.parameters() for model in models[::-1]), strict=True):
        assert torch.equal(weights, expected)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu.py", "stages"])
    with pytest.raises(SystemExit, match="no NVIDIA GPU is visible: nvidia-smi"):
        gpu.main()
