"""make gpu, on a small model and the CPU: all but the GPU itself."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from torch import nn

sys.path.insert(0, str(ROOT / "bench"))
import gpu
import nanogpt_loop

from recipes import gpt

LAYERS, HEADS, CONTEXT = 1, 1, 64
SMALL = (
    f"--layers {LAYERS} --heads {HEADS} --context {CONTEXT} --steps_per_epoch 2 "
    "--peak_tflops 0.01 --snapshot_path none.pt"
).split()


def test_table(tmp_path, monkeypatch):
    """Both loops train, and each gets a row, with the tokens per second and the MFU it printed."""
    monkeypatch.chdir(tmp_path)
    outputs = []
    run = gpu.run

    def recorded(command):
        outputs.append(run(command))
        return outputs[-1]

    monkeypatch.setattr(gpu, "run", recorded)
    variants = {name: command for name, command in gpu.VARIANTS.items() if len(command) == 1}
    table = gpu.report("H200", gpu.benchmark(variants, SMALL, [2])).splitlines()
    assert table[0].startswith("| H200, torch 2.")
    flops_per_token = gpt.GPT(LAYERS, HEADS, CONTEXT).flops_per_token
    for name, output, row in zip(variants, outputs, table[2:], strict=True):
        assert output.count("tokens/s") == 2  # an epoch to warm up, and the one that counts
        _, first, batch_size, throughput, mfu, memory, _ = row.split("|")
        assert (first.strip(), batch_size.strip(), memory.strip()) == (name, "2", "0.0 GB")
        assert output.rpartition(" tokens/s")[0].endswith(throughput.rstrip())
        tokens_per_second = float(throughput.replace(",", ""))
        expected = 100 * tokens_per_second * flops_per_token / 0.01e12
        assert float(mfu.rstrip("% ")) == pytest.approx(expected, abs=0.06)
    assert not list(tmp_path.iterdir())  # no snapshot


def test_each_variant_trains_with_the_largest_batch_that_fits(monkeypatch, capsys):
    tried = []

    def run(command):
        tried.append(int(command[-1]))
        if tried[-1] > 16:
            return None
        return "9 tokens/s, MFU 1%\n1,234 tokens/s, MFU 51.2%\npeak memory 70.1 GB\n"

    monkeypatch.setattr(gpu, "run", run)
    rows = list(gpu.benchmark(dict(itertools.islice(gpu.VARIANTS.items(), 2)), [], [64, 32, 16, 8]))
    assert tried == [64, 32, 16, 16]
    assert rows[0] == "| recipes/gpt.py | 16 | 1,234 | 51.2 % | 70.1 GB |"
    assert capsys.readouterr().out.count("out of memory") == 2
    with pytest.raises(SystemExit, match="LAYERS"):
        list(gpu.benchmark(gpu.VARIANTS, [], [32]))


def test_failures():
    """Only a lack of memory makes the batch smaller; any other failure is shown."""
    raises = [
        sys.executable,
        "-c",
        "import torch; raise torch.OutOfMemoryError('CUDA out of memory')",
    ]
    assert gpu.run(raises) is None
    with pytest.raises(SystemExit, match="a broken driver"):
        gpu.run([sys.executable, "-c", "raise RuntimeError('a broken driver')"])


def test_steps_are_those_of_gpt():
    """From the same weights and batches, nanoGPT's step has the losses and weights of gpt.py's."""
    models = [gpt.GPT(LAYERS, HEADS, CONTEXT) for _ in range(2)]
    for model in models:
        model.init_weights(seed=0)
    optimizers = [gpt.configure_optimizer(model, 1e-3) for model in models]
    trainer = SimpleNamespace(
        model=models[0],
        optimizer=optimizers[0],
        loss_fn=nn.CrossEntropyLoss(),
        device=torch.device("cpu"),
        use_bfloat16=False,
    )
    text = torch.randint(256, (10_000,), dtype=torch.uint8)
    args = SimpleNamespace(batch_size=4, context=CONTEXT)
    for _ in range(5):
        inputs, targets = nanogpt_loop.get_batch(text, args, trainer.device)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        expected = gpt.Trainer._run_batch(trainer, inputs, targets)
        loss = nanogpt_loop.compute_loss(models[1], inputs, targets)
        assert loss.detach() == expected
        nanogpt_loop.update(models[1], loss, optimizers[1])
    for weights, expected in zip(*(model.parameters() for model in models[::-1]), strict=True):
        assert torch.equal(weights, expected)


def test_text_is_long_enough(tmp_path, capsys):
    """Python's own source code is, for the default; where it is not, letters take its place."""
    enough = gpt.VAL_CHUNKS + gpu.BATCH_SIZES[0] * gpu.STEPS
    assert gpu.text_options(tmp_path, enough, gpu.CONTEXT) == []
    option, path = gpu.text_options(tmp_path, 10**5, CONTEXT)
    assert option == "--text" and len(gpt.TextDataset(tmp_path / path, CONTEXT)) == 10**5
    assert "too short" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu(shell):
    job = shell.start(f"python {ROOT}/bench/gpu.py")
    assert job.wait() == 1
    assert job.output.startswith("no NVIDIA GPU is visible: nvidia-smi")
    assert job.output.count("\n") == 1
