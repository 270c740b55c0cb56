"""A reader's own texts, chats, models and optimizers: taken as they are, or refused in a line."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_by_hand import DDP, FSDP_BY_HAND, MODELS, ZERO, train
from test_finetune import CHAT_TEMPLATE, CONFIG, make_model, run_here
from test_gpt_sharded import start
from test_tokens import END, prepare
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gpt import finetune, finetune_chat, prepare_tokens
from tools.launch.snapshots import max_abs_diff

HELLO = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "a\u2028b\x85c"}  # which str.splitlines() would cut
THINKING = CHAT_TEMPLATE.replace("<assistant>{% endif", "<assistant><think>{% endif")


def read_chats(folder, template, *messages):
    """Returns the dataset of a file with a byte order mark, and twice a chat and a blank line."""
    make_model(folder / "model", "Llama")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", chat_template=template)
    chat = json.dumps({"messages": messages, "tools": [{}]}, ensure_ascii=False)
    (folder / "chats").write_text(f"{chat}\n\n{chat}\n \n", encoding="utf-8-sig")
    return tokenizer, finetune_chat.ChatDataset(folder / "chats", 60, tokenizer)


def test_chats(tmp_path):
    tokenizer, chats = read_chats(tmp_path, "{{ tools | length }}" + CHAT_TEMPLATE, HELLO, ANSWER)
    assert len(chats) == 2
    for inputs, targets in chats:
        assert tokenizer.decode(inputs).startswith("1<user>Hi;<assistant>a\u2028b\x85c;")
        assert tokenizer.decode(targets[targets != finetune_chat.IGNORED]) == "a\u2028b\x85c;"


def test_refused_chats(tmp_path):
    with pytest.raises(ValueError, match="a chat must end with the assistant's answer"):
        read_chats(tmp_path, CHAT_TEMPLATE, ANSWER, HELLO)
    with pytest.raises(ValueError, match=r"the template's prompt '.*<think>' does not begin '.*a"):
        read_chats(tmp_path, THINKING, HELLO, ANSWER)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (f"a{END}b\n".encode(), f"a{END}b\n"),
        (b"a\r\nb\r\r\n", "a\r\nb\r\r\n"),
        (b"\xef\xbb\xbfa\n", "a\n"),
        (b"abc " * 80_000, "abc " * 80_000),
    ],
)
def test_prepared(tmp_path, data, text):
    """Decoded, the tokens are the text and one end, even with a tokenizer that cuts and pads."""
    (tmp_path / "text").write_bytes(data)
    assert prepare(tmp_path, "tokens --text text --vocab_size 300").returncode == 0
    assert max(map(len, prepare_tokens.pieces([tmp_path / "text"]))) <= 200_000
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "other.json"))
    assert prepare(tmp_path, "other --text text --tokenizer other.json").returncode == 0
    for folder in ("tokens", "other"):
        shard = (tmp_path / folder / "000000.uint16").read_bytes()
        tokens = torch.frombuffer(bytearray(shard), dtype=torch.uint16).tolist()
        assert tokens.count(tokenizer.token_to_id(END)) == 1
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text + END


@pytest.mark.parametrize("tied", [True, False])
def test_flops(tmp_path, monkeypatch, tied):
    num_parameters = make_model(tmp_path / "model", "Llama", tie_word_embeddings=tied)
    counts = []
    monkeypatch.setattr(finetune.Trainer, "train", lambda self: counts.append(self.flops_per_token))
    run_here(tmp_path, monkeypatch)
    looked_up = 0 if tied else CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert counts == [6 * (num_parameters - looked_up)]


REFUSED = pytest.raises(SystemExit, match=r"lm_head\.weight is not the embedding: untie them")


@pytest.mark.parametrize(("factor", "outcome"), [(1, nullcontext()), (2, REFUSED)])
def test_tied_head_in_the_files(tmp_path, monkeypatch, factor, outcome):
    make_model(tmp_path / "model", "Qwen3", tie_word_embeddings=True)
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = factor * weights["model.embed_tokens.weight"]
    save_file(weights, path, {"format": "pt"})
    with outcome:
        run_here(tmp_path, monkeypatch)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("ranks", "pp_size"), [(1, 1), (2, 2), (4, 2)])
def test_validation_with_a_pipeline(shell, ranks, pp_size):
    """Of 14 chunks, in batches of 12, or of 6 on two ranks: the loss of fsdp.py."""
    setup = "torch.set_default_dtype(torch.float64)"
    options = "--val_tokens 112 --eval_every_steps 1 --n_layer 2"
    job = start(shell, "fsdp.py", "one", 1, setup, options, steps=2)
    expected = re.search(r"val loss (\S+),", job.succeeds())[1]
    options += f" --pp_size {pp_size} --micro_batches 3"
    job = start(shell, "pipeline_parallel.py", "several", ranks, setup, options, steps=2)
    assert re.search(r"val loss (\S+),", job.succeeds())[1] == expected


GROUPS = """
SGD = torch.optim.SGD
def two_groups(parameters, lr, momentum):
    parameters = list(parameters)
    return SGD([{"params": parameters[1::2]}, {"params": parameters[::2], "lr": 0.1}], lr, momentum)
torch.optim.SGD = two_groups
"""


@pytest.mark.parametrize("script", [ZERO, FSDP_BY_HAND])
def test_two_parameter_groups(shell, script):
    setup = f"torch.set_default_dtype(torch.float64)\n{MODELS['toy']}{GROUPS}"
    expected = train(shell, setup, "torch", (DDP, 2), (DDP, 2))
    found = train(shell, setup, "ours", (script, 2), (script, 2))
    assert max_abs_diff(found, expected) < 1e-12
