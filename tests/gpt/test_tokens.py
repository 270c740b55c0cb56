"""gpt/prepare_tokens.py and gpt/tokens.py: text tokenized once, into shards on disk."""

import json
import os
import subprocess
import sys

import pytest
import torch
from gpt_helpers import prepare, save_tokenizer, write_tokens
from helpers import SHORT_GPT, TIMEOUT_S, gpt_config, patch, run
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import one_hot

from gpt.prepare_tokens import pieces
from gpt.tokens import GPT, TextDataset
from tools.launch.snapshots import load_gpt
from tools.steps import ROOT

TINY = "--n_layer 1 --n_head 1 --n_embd 16"
END = "<|endoftext|>"


def test_prepared(tmp_path):
    """Decoded, the shards are the texts, each with one end; they begin with a byte order mark."""
    texts = ["Ein Satz, 2026.\n" * 1000, "Größe, 你好\n" * 500, f"a{END}b\n", "a\r\nb\r\r\n"]
    texts.append("abc " * 80_000)  # one line
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8-sig", newline="")
    names = [f"{number}.txt" for number in range(len(texts))]
    assert max(map(len, pieces([tmp_path / name for name in names]))) <= 200_000
    options = f"--text {' '.join(names)} --vocab_size 300 --shard_tokens"
    result = prepare(tmp_path, f"tokens {options} 1000")
    assert result.returncode == 0 and not result.stderr, result.stderr
    shards = sorted((tmp_path / "tokens").glob("*.uint16"))
    sizes = [path.stat().st_size for path in shards]
    lines = "".join(f"{path.name} {path.stat().st_size}\n" for path in shards)
    assert (tmp_path / "tokens" / "sizes.txt").read_text() == lines
    assert (tmp_path / "tokens" / "end_token.txt").read_text() == END
    assert len(sizes) > 2 and set(sizes[:-1]) == {2000} and sizes[-1] <= 2000
    data = b"".join(path.read_bytes() for path in shards)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint16).tolist()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert text == "".join(text + END for text in texts)
    assert tokens.count(tokenizer.token_to_id(END)) == len(texts)
    counts = f"{len(tokens):,} tokens of {tokenizer.get_vocab_size()} in {len(shards)} files"
    assert counts in result.stdout
    assert tokenizer.encode("2026<|user|>").tokens == ["2", "0", "2", "6", "<|user|>"]
    dataset = TextDataset(shards[0], 10, 300)
    assert [chunk.tolist() for chunk in dataset[3]] == [tokens[30:40], tokens[31:41]]

    # A tokenizer that exists can be used, even one that cuts and pads.
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    result = prepare(tmp_path, f"other {options} 1000000 --tokenizer tokenizer.json")
    assert (tmp_path / "other" / "000000.uint16").read_bytes() == data, result.stderr

    lines = [json.dumps({"text": text, "id": 1}) for text in texts[:4]]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n\n")
    prepare(tmp_path, "lines --text texts.jsonl --tokenizer tokens/tokenizer.json")
    written = (tmp_path / "lines" / "000000.uint16").read_bytes()
    assert len(written) > 10_000 and data.startswith(written)


@pytest.mark.long
def test_killed(tmp_path):
    """It continues with the same settings alone; two workers write what one does without a kill."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(60_000)))
    os.utime(text, (0, 0))
    options = "--text text.jsonl --vocab_size 300 --num_workers 2 --shard_tokens 1000"
    command = [sys.executable, ROOT / "gpt" / "prepare_tokens.py", "tokens", *options.split()]
    unfinished = tmp_path / "tokens.tmp"
    shard = unfinished / "tokens" / "000000.uint16"
    for event in (unfinished, unfinished / "progress.json", shard, shard.with_stem("000099")):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
        while not event.exists():
            assert process.poll() is None
        process.kill()
        process.communicate(timeout=TIMEOUT_S)  # the workers have ended, too
        assert process.returncode < 0 and not list(unfinished.glob("*.uint*"))
        assert {path.stat().st_size for path in shard.parent.glob("*")} <= {2000}  # no tokenizer
    inode = shard.stat().st_ino
    assert "--shard_tokens was 1000 and is 10009" in prepare(tmp_path, f"tokens {options}9").stderr
    os.utime(text, (0, 1))
    assert "tokens.tmp: text.jsonl was of " in prepare(tmp_path, f"tokens {options}").stderr
    os.utime(text, (0, 0))
    assert prepare(tmp_path, f"tokens {options}").returncode == 0
    assert (tmp_path / "tokens" / shard.name).stat().st_ino == inode and not unfinished.exists()
    assert prepare(tmp_path, f"whole {options} --num_workers 1").returncode == 0
    assert run("diff", "-r", "tokens", "whole", folder=tmp_path).returncode == 0


def test_long_text_with_a_tokenizer_that_begins_each_with_a_space(tmp_path):
    """It is not encoded in pieces, of which each would begin with one."""
    text = "abc def\n" * 30_000
    (tmp_path / "text").write_text(text)
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["?", END], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prepare(tmp_path, "tokens --text text --tokenizer tokenizer.json")
    written = (tmp_path / "tokens" / "000000.uint16").read_bytes()
    tokens = torch.frombuffer(bytearray(written), dtype=torch.uint16).tolist()
    assert tokens == [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]


@pytest.mark.long
def test_bad_input(tmp_path, shell):
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "latin1").write_bytes(b"gr\xfcn\n")
    save_tokenizer(tmp_path / "tokenizer.json", 10)  # without END
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    (tmp_path / "a.JSON").write_text('[{"text": "a"}]\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "half a pair: \\ud83d"}\n')
    not_utf_8 = "--text latin1 is not UTF-8: convert it, such as with iconv"
    for options, status, message in [
        (f"{tmp_path} --text text", 2, f"{tmp_path} exists: name another folder, or delete it"),
        ("tokens --text missing", 2, "cannot read --text missing"),
        ("tokens --text text --vocab_size 259", 2, "--vocab_size must be 260 or more"),
        ("tokens --text text --tokenizer missing", 1, "cannot read --tokenizer missing: "),
        ("tokens --text text --tokenizer tokenizer.json", 1, f"--tokenizer has no token {END}: "),
        ("text/tokens --text text", 1, "cannot write text/tokens: "),
        ("tokens --text text latin1", 1, not_utf_8),
        ("tokens --text a.jsonl", 1, "--text a.jsonl, line 2 is not like "),
        ("tokens --text b.jsonl", 1, "--text b.jsonl, line 1 is not like "),
        ("tokens --text a.JSON", 1, "--text a.JSON, line 1 is not like "),
        ("tokens --text empty.jsonl", 1, "--text has no text: each document is empty"),
        ("tokens --text text --end_token hello", 1, "--end_token hello also stands for a text"),
        ("tokens --text text --tokenizer tokenizer.json --end_token 9", 1, "--end_token 9 also "),
    ]:
        result = prepare(tmp_path, options)
        assert result.returncode == status and message in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "tokens").exists()
    shell.ranks("gpt/tokens.py").fails(
        "no tokens in --data tokens: start gpt/prepare_tokens.py first"
    )
    assert prepare(tmp_path, "tokens --text text --shard_tokens 1").returncode == 0
    for token in ("EOS", "a"):
        (tmp_path / "tokens" / "end_token.txt").write_text(token)
        shell.ranks("gpt/documents.py").fails(f"does not end with {token}: see end_token.txt")
    (tmp_path / "tokens" / "end_token.txt").unlink()  # as in a folder of an older version
    shell.ranks("gpt/documents.py").fails("cannot read --data tokens: ", "tokens/end_token.txt")
    shard = tmp_path / "tokens" / "000001.uint16"
    whole = shard.read_bytes()  # one token
    for content in (None, b"", b"a", bytes(4)):
        shard.unlink() if content is None else shard.write_bytes(content)
        shell.ranks("gpt/tokens.py").fails("missing, cut or new: sizes.txt lists what was written")
        shard.write_bytes(whole)
    (tmp_path / "tokens" / "sizes.txt").unlink()  # as in a folder of an older version
    shell.ranks("gpt/tokens.py").fails("--data has 0 chunks, and")
    (tmp_path / "tokens" / "1.uint16").symlink_to("gone")
    shell.ranks("gpt/tokens.py").fails("cannot read --data tokens: ", "No such file", "1.uint16")
    (tmp_path / "tokens" / "1.uint16").unlink()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{")
    shell.ranks("gpt/tokens.py").fails("cannot read --data tokens: ")
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokens" / "tokenizer.json"))
    error = "it has no token for the end of a line: set --generate 0"
    shell.ranks("gpt/tokens.py --generate 1").fails(error)
    for path in (tmp_path / "tokens").glob("*.uint16"):
        path.unlink()
    shell.ranks("gpt/tokens.py").fails("no tokens in --data tokens: ")


@pytest.mark.long
def test_vocabulary_of_llama_3(shell):
    """128,256 tokens need 32 bits; a number that the tokenizer does not know gets a line."""
    numbers = [*range(128_000, 128_255)] * 2
    (shell.folder / "text").write_text(" ".join(map(str, numbers)))
    save_tokenizer(shell.folder / "tokenizer.json", 128_255, END)
    result = prepare(shell.folder, "tokens --text text --tokenizer tokenizer.json")
    assert "511 tokens of 128,256 in 1 files" in result.stdout, result.stderr
    (shard,) = (shell.folder / "tokens").glob("*.uint32")
    tokens = torch.frombuffer(bytearray(shard.read_bytes()), dtype=torch.uint32).tolist()
    assert tokens == [*numbers, 128_255]
    options = f"1 1 --data tokens {TINY} --context 8 --val_tokens 8 --batch_size 62"
    script = patch(shell.folder, "gpt/tokens.py", SHORT_GPT)
    output = shell.ranks(f"{script} {options}").succeeds()
    assert "496 tokens to train on, 8 to validate on, 7 in neither" in output
    assert load_gpt(shell.folder / "snapshot")["shape"].endswith("vocab_size=128256")
    save_tokenizer(shell.folder / "tokens" / "tokenizer.json", 128_200)
    job = shell.ranks(f"{script} {options} --snapshot_path other")
    job.fails(f"{shard.relative_to(shell.folder)} has token ", "tokenizer.json only 128200")


PRINT_GRADIENTS = """
@after(script.Trainer, "_run_batch")
def print_gradients(self, inputs, targets):
    gradient = self.model.head.weight.grad.full_tensor()
    print("gradient of", len(gradient), gradient[:300].any().item(), gradient[300:].any().item())
"""


def test_padding_of_the_vocabulary(shell):
    """The rows up to a multiple of 128 get no gradient, and are not generated."""
    write_tokens(shell.folder / "tokens", 20, 8)
    script = patch(shell.folder, "gpt/tokens.py", SHORT_GPT + PRINT_GRADIENTS)
    output = shell.ranks(f"{script} 1 1 {TINY} --context 8 --val_tokens 24").succeeds()
    assert "gradient of 384 True False\n" in output
    model = GPT(gpt_config(1, 2, 16, 8), 300)
    smaller = GPT(gpt_config(1, 2, 16, 8), 128)  # by 256 rows, which multiply in the head alone
    assert model.flops_per_token - smaller.flops_per_token == 6 * 256 * 16
    # A text begins with the token for the end of a line, here 0.
    tokenizer = Tokenizer.from_file(str(shell.folder / "tokens" / "tokenizer.json"))
    padding = 2e9 * (torch.arange(384) >= 300)
    model.forward = lambda tokens: 1e9 * one_hot((tokens + 290) % 300, 384) + padding
    assert model.generate(tokenizer, "\n", 2) == "0 290 280"
