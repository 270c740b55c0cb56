"""gpt/llama.py: the Llama of transformers, trained here and exported as the page tells."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import PLAIN_SGD, SHORT_GPT, SHORT_VAL, SIGNAL, VAL_CHUNKS, fences, gpt_config, patch
from test_gpt_sharded import FLOAT64
from test_tokens import prepare
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt.llama import GPT
from tools.launch.snapshots import load_gpt, max_abs_diff, write_text

CONTEXT = 8
BATCH_SIZE = 12  # of all ranks together
STEPS = 20
(EXPORT,) = fences("gpt/llama.md", "python")


def make_tokens(folder):
    """Makes a tokenizer, and random tokens for `STEPS` steps and a validation set."""
    write_text(folder / "text", 500, CONTEXT)
    result = prepare(folder, "tokens --text text --vocab_size 300")
    assert result.returncode == 0, result.stderr
    size = (STEPS * BATCH_SIZE + VAL_CHUNKS) * CONTEXT + 1
    tokens = torch.randint(300, [size], generator=torch.Generator().manual_seed(0))
    shard = folder / "tokens" / "000000.uint16"
    shard.write_bytes(tokens.to(torch.uint16).numpy().tobytes())


def start(shell, ranks, name, setup="", options="", n_kv_head=2, **variables):
    script = patch(shell.folder, "gpt/llama.py", SHORT_GPT + setup)
    options += f" --n_layer 2 --n_head 4 --n_kv_head {n_kv_head} --n_embd 32 --context {CONTEXT}"
    options += f" {SHORT_VAL} --batch_size {BATCH_SIZE // ranks} --snapshot_path {name}"
    return shell.ranks(f"{script} 1 1 --data tokens {options}", ranks, **variables)


@pytest.mark.parametrize(
    ("setup", "learning_rate", "tolerance"), [(FLOAT64, 0.01, 1e-12), (PLAIN_SGD, 0.3, 5e-5)]
)
def test_ranks(shell, setup, learning_rate, tolerance):
    """Two ranks, stopped in mid-epoch and resumed on three, end with the weights of one."""
    make_tokens(shell.folder)
    options = f"--learning_rate {learning_rate}"
    start(shell, 1, "one", setup, options).succeeds()
    stop = {"SIGNAL": "15", "SIGNAL_AT": f"0 {3 * BATCH_SIZE}"}
    job = start(shell, 2, "several", setup + SIGNAL, options, **stop)
    job.fails("stopped by a signal")
    assert f"epoch 0 + {10 * BATCH_SIZE} samples" in job.output
    start(shell, 3, "several", setup, f"{options} --recompute").succeeds()
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
    monkeypatch.setattr("sys.argv", ["export.py", "llama", "tokens", "exported"])
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
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>ab<|endoftext|><|assistant|>c<|endoftext|>"
    ids = tokenizer(text).input_ids
    assert [i for i in ids if i < 4] == [2, 0, 3, 0]  # user, end, assistant, end
    text = exported.generate(tokens[:1, :3], max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        expected = model(text[:, :-1]).argmax(2)
    assert text.shape[1] > 3 and torch.equal(text[:, 3:], expected[:, 2:])


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
