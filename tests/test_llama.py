"""gpt/llama.py: the Llama of transformers, trained here and exported; and what builds on it."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    PLAIN_SGD,
    SHORT_GPT,
    SHORT_VAL,
    SIGNAL,
    VAL_CHUNKS,
    fences,
    gpt_config,
    long,
    patch,
)
from test_gpt_sharded import FLOAT64
from test_tokens import prepare
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt import documents
from gpt.llama import GPT
from tools.launch.snapshots import load_gpt, max_abs_diff, write_text

CONTEXT = 8
BATCH_SIZE = 12  # of all ranks together
STEPS = 20
END = 0  # the token that ends a document
(EXPORT,) = fences("gpt/llama.md", "python")


def make_tokens(folder):
    """Makes a tokenizer, and random tokens for `STEPS` steps and a validation set."""
    write_text(folder / "text", 500, CONTEXT)
    result = prepare(folder, "tokens --text text --vocab_size 300")
    assert result.returncode == 0, result.stderr
    size = (STEPS * BATCH_SIZE + VAL_CHUNKS) * CONTEXT + 1
    tokens = torch.randint(300, [size], generator=torch.Generator().manual_seed(0))
    tokens[torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.2] = END
    tokens[5 * CONTEXT : 6 * CONTEXT] = END  # a chunk without a target that counts
    shard = folder / "tokens" / "000000.uint16"
    shard.write_bytes(tokens.to(torch.uint16).numpy().tobytes())


def start(
    shell, ranks, name, setup="", options="", n_kv_head=2, script="gpt/llama.py", **variables
):
    script = patch(shell.folder, script, SHORT_GPT + setup)
    options += f" --n_layer 2 --n_head 4 --n_kv_head {n_kv_head} --n_embd 32 --context {CONTEXT}"
    options += f" {SHORT_VAL} --batch_size {BATCH_SIZE // ranks} --snapshot_path {name}"
    return shell.ranks(f"{script} 1 1 --data tokens {options}", ranks, **variables)


@pytest.mark.parametrize(
    ("setup", "learning_rate", "tolerance"), [(FLOAT64, 0.01, 1e-12), (PLAIN_SGD, 0.1, 5e-5)]
)
@pytest.mark.parametrize(
    "script", ["gpt/llama.py", *long("gpt/documents.py", "gpt/chunked_loss.py")]
)
def test_ranks(shell, script, setup, learning_rate, tolerance):
    """Two ranks, stopped in mid-epoch and resumed on four, end with the weights of one."""
    make_tokens(shell.folder)
    options = f"--learning_rate {learning_rate}"
    reference = script.replace("chunked_loss", "llama")
    start(shell, 1, "one", setup, options, script=reference).succeeds()
    stop = {"SIGNAL": "15", "SIGNAL_AT": f"0 {3 * BATCH_SIZE}"}
    job = start(shell, 2, "several", setup + SIGNAL, options, script=script, **stop)
    job.fails("stopped by a signal")
    assert f"epoch 0 + {10 * BATCH_SIZE} samples" in job.output
    start(shell, 4, "several", setup, f"{options} --recompute", script=script).succeeds()
    one, several = (load_gpt(shell.folder / name)["model"] for name in ("one", "several"))
    diff = max_abs_diff(one.values(), several.values())
    print("several ranks differ from one by", diff)
    assert diff < tolerance


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_exported(shell, monkeypatch, n_kv_head):
    """transformers loads what two ranks have trained: the same logits, tokens and text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tokens(shell.folder)
    options = "--learning_rate 0.02"
    start(shell, 2, "llama", options=options, n_kv_head=n_kv_head).succeeds()
    monkeypatch.chdir(shell.folder)
    exec(EXPORT, {})
    exported = AutoModelForCausalLM.from_pretrained("exported")
    model = GPT(gpt_config(2, 4, 32, CONTEXT, n_kv_head=n_kv_head), 300)
    model.load_state_dict(load_gpt(Path("llama"))["model"])
    tokens = torch.randint(300, (4, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens)
        diff = max_abs_diff([exported(tokens).logits], [logits])
    print("the exported logits differ by", diff, "of", logits.abs().max().item())
    assert diff < 1e-5 and logits.abs().max() > 1

    tokenizer = AutoTokenizer.from_pretrained("exported")
    assert tokenizer.eos_token_id == exported.config.eos_token_id == 0
    assert tokenizer.decode(tokenizer("abc  hgf\n").input_ids) == "abc  hgf\n"
    text = exported.generate(tokens[:1, :3], max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        expected = model(text[:, :-1]).argmax(2)
    assert text.shape[1] > 3 and torch.equal(text[:, 3:], expected[:, 2:])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_packed_documents(request, dtype, tolerance):
    """Their loss and gradients are those of each alone, wherever in a chunk it stands."""
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(dtype)  # of the angles of rotary positions, too
    model = documents.GPT(gpt_config(2, 4, 32, 24, n_kv_head=2), 300, END)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(1, 300, (2, 25), generator=generator)
    packed[0, [6, 7, 19]] = packed[1, 24] = END

    def gradients(chunks):
        """Returns those of the total loss, and it."""
        total = 0
        for chunk in chunks:
            inputs, targets = chunk[None, :-1], chunk[None, 1:]
            targets = targets.masked_fill(inputs == END, documents.IGNORED)
            total += documents.next_token_loss(model(inputs), targets) * targets.numel() / 48
        return [total, *torch.autograd.grad(total, [*model.parameters()])]

    alone = [packed[0, :7], packed[0, 8:20], packed[0, 20:], packed[1]]
    diff = max_abs_diff(gradients(packed), gradients(alone))
    print("packed documents differ by", diff)
    assert diff < tolerance


def test_weights():
    """As many as Llama has, and small where they add to the residual stream."""
    model = GPT(gpt_config(2, 4, 96, 8, n_kv_head=2), 300)
    flops_per_token = model.flops_per_token
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))  # what init_weights draws is sharded
    model.init_weights(seed=0)
    dist.destroy_process_group()
    for name, parameter in model.named_parameters():
        weight = parameter.to_local()
        if "norm" in name:
            assert torch.equal(weight, torch.ones(96))
        else:
            added = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert weight.std().item() == pytest.approx(0.01 if added else 0.02, rel=0.05)
    attention = (2 * 96 + 2 * 48) * 96  # queries and outputs; keys and values
    num_params = 2 * (attention + 3 * 256 * 96 + 2 * 96) + 96 + 384 * 96
    assert flops_per_token == 6 * num_params + 12 * 2 * 96 * 8
