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
from tools.launch.jobs import pretend_gpus
from tools.steps import ROOT

N_LAYER, N_HEAD, N_EMBD, CONTEXT = 1, 1, 64, 64


def small_model():
    model = pretrain.GPT(gpt_config(N_LAYER, N_HEAD, N_EMBD, CONTEXT))
    model.init_weights(seed=0)
    return model


OUT_OF_MEMORY = 'raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")'
HANGS = "import time\ntime.sleep(9999)"


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """Two GPUs are pretended, here and in what is started; models are small."""
    variables = pretend_gpus(2)
    modules = f"{variables['PYTHONPATH']}:{tmp_path}"
    for name, value in (variables | {"PYTHONPATH": modules}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "out_of_memory.py").write_text(OUT_OF_MEMORY)
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "fails.py").write_text('raise ValueError("no such luck")')
    answers = {"get_device_name": "NVIDIA H200", "device_count": 2, "is_available": True}
    answers["is_bf16_supported"] = True
    answers["get_device_properties"] = SimpleNamespace(total_memory=141e9)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **options: answer)
    settings = {"N_HEAD": N_HEAD, "N_EMBD": N_EMBD, "CONTEXT": CONTEXT, "BATCH_SIZES": [2]}
    settings |= {"STEPS": 2, "MANY_EPOCHS": 5, "TIME_LIMIT_S": 30, "versions": lambda: "driver 1"}
    for name, value in settings.items():
        monkeypatch.setattr(gpu, name, value)


def report_of(tmp_path, monkeypatch, command):
    """Returns the rows that a command appends to a report, by their first cell."""
    path = tmp_path / "report.md"
    path.write_text("# Field reports\n")
    monkeypatch.setattr("sys.argv", ["gpu.py", *command.split(), "--report", str(path)])
    gpu.main()
    lines = path.read_text().splitlines()
    assert lines[0] == "# Field reports" and lines[2].startswith(f"## {command.split()[0]}: ")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[8:]]
    assert lines[4].endswith(": driver 1") and {len(row) for row in rows} == {
        lines[6].count("|") - 1
    }
    return {row[0]: row[1:] for row in rows}


@pytest.mark.nightly
@pytest.mark.long
def test_gpt(pretended, tmp_path, monkeypatch):
    """Both loops train, with the speed and MFU that they printed; what fails ends only its row."""
    outputs = []
    run = gpu.run

    def recorded(command):
        outputs.append(run(command))
        return outputs[-1]

    monkeypatch.setattr(gpu, "run", recorded)
    names = ["out_of_memory", "hangs", "fails", "bench.gpu", "bench.nanogpt_loop"]
    monkeypatch.setattr(gpu, "VARIANTS", {name: name for name in names})
    rows = report_of(tmp_path, monkeypatch, "gpt --layers 1 --peak_tflops 0.01")
    assert list(rows) == names
    failed = [rows.pop(name)[1] for name in names[:3]]
    reasons = ["out of memory", "no end in 30 s", "ValueError: no such luck"]
    assert failed == [f"failed: {reason}" for reason in reasons]
    flops_per_token = small_model().flops_per_token
    for (batch_size, throughput, mfu, memory), output in zip(rows.values(), outputs, strict=True):
        epochs = re.findall(r"(\S+) tokens/s, MFU \S+%(?! in all)", output)
        assert len(epochs) == 2  # one to warm up, and the one that counts
        assert (batch_size, throughput, memory) == ("2", epochs[-1], "0.0 GB")
        expected = 100 * float(throughput.replace(",", "")) * flops_per_token / 0.01e12
        assert float(mfu.rstrip("% ")) == pytest.approx(expected, abs=0.06)


@pytest.mark.nightly
@pytest.mark.long
def test_stages(pretended, tmp_path, monkeypatch):
    """Each has the loss of one process; another seed is told, and what fails ends its row alone."""
    stage_command = gpu.stage_command

    def with_faults(stage, gpus):
        command = stage_command(stage, gpus)
        if stage == "multigpu.py":
            return f"python {tmp_path}/hangs.py"
        return command + " --seed 1" * (stage == "multinode.py")

    monkeypatch.setattr(gpu, "stage_command", with_faults)
    rows = report_of(tmp_path, monkeypatch, "stages")
    assert list(rows) == [f"`{stage}`" for stage in gpu.STAGES]
    assert rows.pop("`multigpu.py`") == ["failed: no end in 30 s", ""]
    assert re.match(r"\d\.\d+, not \d", rows.pop("`multinode.py`")[0])
    assert all(cells[0].endswith(", equal") for cells in rows.values())


def test_batch_size_fits_and_is_that_of_all():
    assert [gpu.batch_size_that_fits(24, size) for size in (141e9, 80e9, 50e9)] == [16, 16, 8]


@pytest.mark.nightly
@pytest.mark.long
def test_stages_on_three_gpus(tmp_path, monkeypatch):
    """Where the sampler takes a sample twice, the loss is that of as many CPUs."""
    monkeypatch.setattr(gpu, "MANY_EPOCHS", 5)
    monkeypatch.setattr(gpu, "STAGES", ["multigpu_torchrun.py", "resumable.py", "elastic_ddp.py"])
    assert all(", equal |" in row for row in [*gpu.stage_rows(3, tmp_path)][2:])


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
        recent_loss=torch.zeros(()),
        recent_samples=0,
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
        trainer.total_loss.zero_()
        pretrain.Trainer._run_batch(trainer, inputs, targets)
        loss = nanogpt_loop.compute_loss(models[1], inputs, targets)
        assert loss.detach() == trainer.total_loss / len(inputs)
        nanogpt_loop.update(models[1], loss, optimizers[1])
    for weights, expected in zip(*(model.parameters() for model in models[::-1]), strict=True):
        assert torch.equal(weights, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu(shell):
    job = shell.start("python -m bench.gpu gpt --peak_tflops 989", PYTHONPATH=str(ROOT))
    assert job.wait() == 1
    assert job.output.startswith("no NVIDIA GPU is visible: nvidia-smi")
    assert job.output.count("\n") == 1
