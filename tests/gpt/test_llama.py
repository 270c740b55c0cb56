"""gpt/llama.py: the Llama of transformers, trained here and exported; documents in its chunks.

test_shards.py shows that it trains alike on any number of ranks, and what builds on it.
"""

import argparse
import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpt_helpers import SMALL, prepare, save_tokenizer, start
from helpers import LONG, SIGNAL, Lazy, first, gpt_config
from jinja2 import TemplateError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt import documents, llama_tensor_parallel
from gpt.llama import GPT, parse_args
from tools.launch.snapshots import load_gpt, max_abs_diff, write_text

export = Lazy("gpt.export")  # it imports transformers, which takes seconds
END = 0  # the token that ends a document
LLAMA = {"n_hidden": 128, "rope_theta": 1e4, "norm_eps": 1e-6, "tie_word_embeddings": False}
EIGHTH = {  # of the sizes in the config.json of Llama 3.2 1B on the hub, without rope_scaling
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,  # as there
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
OPTIONS_OF_EIGHTH = """--n_embd 256 --n_hidden 1024 --n_head 4 --n_kv_head 1 --norm_eps 1e-5
    --rope_theta 500000 --tie_word_embeddings"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "expected"),
    [("--n_kv_head 2", {"num_key_value_heads": 2}), (OPTIONS_OF_EIGHTH, EIGHTH)],
)
def test_exported(shell, monkeypatch, options, expected):
    """transformers loads what two ranks have trained: the same logits, tokens and text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.llama import modeling_llama

    write_text(shell.folder / "text", 1000, 8)
    prepared = prepare(shell.folder, "tokens --text text --vocab_size 300 --end_token <|end|>")
    assert prepared.returncode == 0
    options = f"--n_layer 2 {options} --learning_rate 0.02"
    start(shell, "llama.py", "llama", 2, options=options).succeeds()
    monkeypatch.chdir(shell.folder)
    for snapshots in ("llama", *map(str, Path("llama").iterdir())):
        monkeypatch.setattr("sys.argv", ["export.py", snapshots, "tokens", "exported"])
        export.main(export.parse_args())
    exported = AutoModelForCausalLM.from_pretrained("exported")
    config = exported.config.to_dict() | exported.config.rope_parameters
    assert expected.items() <= config.items()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("sys.argv", ["llama.py", *f"{SMALL} {options}".split()])
    model = GPT(parse_args(), 300)
    saved = load_gpt(Path("llama"))["model"]
    tied = torch.equal(saved["model.embed_tokens.weight"], saved["lm_head.weight"])
    assert tied == config["tie_word_embeddings"]
    model.load_state_dict(saved)
    tokens = torch.randint(300, (4, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens)[..., :300]  # without the padding
        diff = max_abs_diff([exported(tokens).logits], [logits])
        print("the exported logits differ by", diff, "of", logits.abs().max().item())
        assert diff < 1e-5 and logits.abs().max() > 1
        with monkeypatch.context() as patch:  # theirs computes in float32 always
            patch.setattr(modeling_llama, "LlamaRMSNorm", torch.nn.RMSNorm)
            double = AutoModelForCausalLM.from_pretrained("exported").double()
        logits = copy.deepcopy(model).double()(tokens)[..., :300]
        diff = max_abs_diff([double(tokens).logits], [logits])
        print("in float64 by", diff)
        assert diff < 1e-12

    tokenizer = AutoTokenizer.from_pretrained("exported")
    assert tokenizer.eos_token_id == exported.config.eos_token_id == 0
    assert tokenizer.decode(tokenizer("abc  hgf\n").input_ids) == "abc  hgf\n"
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>ab<|end|><|assistant|>c<|end|>"
    for tools, role in [([{}], "user"), (None, "tool")]:  # which have no token
        with pytest.raises(TemplateError, match="no place for tools, or for " + role):
            tokenizer.apply_chat_template([*chat, {"role": role, "content": ""}], tools)
    ids = tokenizer(text).input_ids
    assert [i for i in ids if i < 4] == [2, 0, 3, 0]  # user, end, assistant, end
    text = exported.generate(tokens[:1, :3], max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        expected = model(text[:, :-1])[..., :300].argmax(2)
    assert text.shape[1] > 3 and torch.equal(text[:, 3:], expected[:, 2:])


def test_no_snapshot_to_export(tmp_path):
    with pytest.raises(SystemExit, match="no complete snapshot in "):
        export.main(argparse.Namespace(snapshots=tmp_path))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), first(1, [(torch.float32, 1e-5), (torch.float64, 1e-12)], LONG)
)
def test_packed_documents(monkeypatch, dtype, tolerance):
    """Their loss and gradients are those of each alone, wherever in a chunk it stands."""
    torch.set_default_dtype(dtype)  # of the angles of rotary positions, too
    monkeypatch.setattr(torch.Tensor, "float", lambda logits: logits.to(dtype))
    model = documents.GPT(gpt_config(1, 4, 32, 24, n_kv_head=2, **LLAMA), 300, END)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(1, 300, (2, 25), generator=generator)
    packed[0, [6, 7, 19]] = packed[1, 24] = END

    def gradients(batches):
        """Returns those of the total loss, and it."""
        total = 0
        for batch in batches:
            inputs, targets = batch[:, :-1], batch[:, 1:]
            targets = targets.masked_fill(inputs == END, documents.IGNORED)
            total += documents.next_token_loss(model(inputs), targets) * targets.numel() / 48
        return [total, *torch.autograd.grad(total, [*model.parameters()])]

    alone = gradients([packed[:1, :7], packed[:1, 8:20], packed[:1, 20:], packed[1:]])
    assert max_abs_diff(gradients([packed]), alone) < tolerance
    # As on a GPU, but computed by plain operations; a CPU is refused, though it has a backward.
    monkeypatch.setattr(documents, "create_mask", documents.create_block_mask)
    for block in model.model.layers:
        block.self_attn.compile(backend="aot_eager")
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    assert max_abs_diff(gradients([packed]), alone) < tolerance


@pytest.mark.long
def test_documents_of_one_token(shell):
    """All targets are ignored, so the losses are 0; llama.py, for which they count, is refused."""
    (shell.folder / "tokens").mkdir()
    save_tokenizer(shell.folder / "tokens" / "tokenizer.json", 300)
    (shell.folder / "tokens" / "0.uint16").write_bytes(bytes(3000))  # END alone
    (shell.folder / "tokens" / "end_token.txt").write_text("0\n")  # as echo writes it
    options = "--eval_every_steps 5"
    job = start(shell, "documents.py", "s", 1, SIGNAL, options, SIGNAL="15", SIGNAL_AT="0 12")
    job.fails("stopped by a signal")
    assert "\nval loss 0\n" in job.output and " | loss 0 | saving" in job.output
    start(shell, "llama.py", "s").fails("its epoch has seed 0, ", ", not seed 0, ")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Full backward hook")  # of CommDebugMode
def test_tensor_parallelism():
    """Four all-gathers a layer, as in arXiv 2205.05198. Compiled, it learns the embedding, too."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = llama_tensor_parallel.GPT(gpt_config(1, 4, 32, 8, n_kv_head=2, **LLAMA), 300)
    mesh = init_device_mesh("cpu", (2,))
    parallel.parallelize_module(model, mesh, llama_tensor_parallel.TP_PLAN)
    tokens = torch.randint(300, (2, 8))
    with parallel.loss_parallel(), CommDebugMode() as mode:
        llama_tensor_parallel.next_token_loss(model(tokens), tokens).backward()
    gathers = mode.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
    assert gathers == 4 + 2  # those of the head and of the embedding
    model.zero_grad()
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    with parallel.loss_parallel():
        llama_tensor_parallel.next_token_loss(model(tokens), tokens).backward()
    assert model.model.embed_tokens.weight.grad.to_local().any()


def test_weights():
    """As many as Llama has, and small where they add to the residual stream."""
    model = GPT(gpt_config(2, 4, 96, 8, n_kv_head=2, **LLAMA), 300)
    flops_per_token = model.flops_per_token
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))  # what init_weights draws is sharded
    model.init_weights(seed=0)
    for name, parameter in model.named_parameters():
        weight = parameter.to_local()
        if "norm" in name:
            assert torch.equal(weight, torch.ones(96))
        else:
            added = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert weight.std().item() == pytest.approx(0.01 if added else 0.02, rel=0.05)
    attention = (2 * 96 + 2 * 48) * 96  # queries and outputs; keys and values
    num_params = 2 * (attention + 3 * 128 * 96 + 2 * 96) + 96 + 384 * 96
    assert flops_per_token == 6 * num_params + 12 * 2 * 96 * 8
