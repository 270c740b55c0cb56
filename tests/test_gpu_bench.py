"""bench/gpu.py, on a small model and the CPU: all but the GPU itself."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import gpt_config

from bench import gpu, nanogpt_loop
from gpt import pretrain
from tools.steps import ROOT

N_LAYER, N_HEAD, N_EMBD, CONTEXT = 1, 1, 64, 64
SMALL = f"--n_layer {N_LAYER} --n_head {N_HEAD} --n_embd {N_EMBD} --peak_tflops 0.01"


def small_model():
    model = pretrain.GPT(gpt_config(N_LAYER, N_HEAD, N_EMBD, CONTEXT))
    model.init_weights(seed=0)
    return model


@pytest.mark.nightly
@pytest.mark.long
def test_table(tmp_path, monkeypatch):
    """Both loops train, and each gets a row, with the tokens per second and the MFU it printed."""
    outputs = []
    run = gpu.run

    def recorded(command):
        outputs.append(run(command))
        return outputs[-1]

    monkeypatch.setattr(gpu, "run", recorded)
    monkeypatch.setattr(gpu, "STEPS", 2)
    variants = {name: gpu.VARIANTS[name] for name in ("gpt/pretrain.py", "nanoGPT's loop")}
    table = gpu.report("H200", gpu.benchmark(variants, SMALL, [2], CONTEXT, tmp_path)).splitlines()
    assert table[0].startswith("| H200, torch 2.")
    flops_per_token = small_model().flops_per_token
    for name, output, row in zip(variants, outputs, table[2:], strict=True):
        epochs = re.findall(r"(\S+) tokens/s, MFU \S+%$", output, re.M)
        assert len(epochs) == 2  # one to warm up, and the one that counts
        _, first, batch_size, throughput, mfu, memory, _ = row.split("|")
        assert (first.strip(), batch_size.strip(), memory.strip()) == (name, "2", "0.0 GB")
        assert epochs[-1] == throughput.strip()
        tokens_per_second = float(throughput.replace(",", ""))
        expected = 100 * tokens_per_second * flops_per_token / 0.01e12
        assert float(mfu.rstrip("% ")) == pytest.approx(expected, abs=0.06)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]  # no snapshot
    chunks = len(pretrain.TextDataset(tmp_path / "text", CONTEXT))
    assert chunks == 1 + 2 * 2  # one to validate on, and steps x batch size


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
        total_loss=torch.zeros(()),
        samples_run=0,
        tokens=0,
        _learning_rate=lambda: 1e-3,
    )
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    args = SimpleNamespace(batch_size=4, context=CONTEXT)
    for _ in range(5):
        inputs, targets = nanogpt_loop.get_batch(text, args, torch.device("cpu"))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        trainer.total_loss.zero_()
        pretrain.Trainer._run_batch(trainer, inputs, targets)
        loss = nanogpt_loop.compute_loss(models[1], inputs, targets)
        assert loss.detach() == trainer.total_loss / len(inputs)
        nanogpt_loop.update(models[1], loss, optimizers[1])
    for weights, expected in zip(*(model.parameters() for model in models[::-1]), strict=True):
        assert torch.equal(weights, expected)


@pytest.mark.nightly
@pytest.mark.long
def test_report_of_the_stages(tmp_path, monkeypatch):
    """Stages on two ranks have the loss of one process; one with another seed is told."""
    stage_command = gpu.stage_command

    def with_another_seed(stage, gpus):
        return stage_command(stage, gpus) + " --seed 1" * (stage == "multigpu_torchrun.py")

    monkeypatch.setattr(gpu, "stage_command", with_another_seed)
    monkeypatch.setattr(gpu, "MANY_EPOCHS", 5)
    monkeypatch.setattr(gpu, "STAGES", ["multigpu_torchrun.py", "elastic_ddp.py"])
    rows = list(gpu.stage_rows(2, tmp_path))
    report = gpu.field_report("2 x H200", "driver 1", "| table |", rows).splitlines()
    assert report[0] == "## 2 x H200" and report[2].endswith(": driver 1")
    for stage, verdict, row in zip(gpu.STAGES, ["not", "equal"], report[-2:], strict=True):
        assert re.match(rf"\| `{stage}` \| \d\.\d+, {verdict}\b", row), row


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu(shell):
    job = shell.start("python -m bench.gpu --peak_tflops 989", PYTHONPATH=str(ROOT))
    assert job.wait() == 1
    assert job.output.startswith("no NVIDIA GPU is visible: nvidia-smi")
    assert job.output.count("\n") == 1
