"""gpt/prepare_tokens.py and gpt/tokens.py: text tokenized once, into shards on disk."""

import pickle
import re

import torch
from helpers import SHORT_GPT, SIGNAL, gpt_config, patch, run
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy

from gpt.tokens import GPT, TextDataset, next_token_loss
from tools.launch.snapshots import load_gpt
from tools.steps import ROOT

TINY = "--n_layer 1 --n_head 1 --n_embd 16"
END = "<|endoftext|>"


def prepare(folder, options):
    return run("python", ROOT / "gpt" / "prepare_tokens.py", *options.split(), folder=folder)


def test_prepared(tmp_path):
    """Decoded, the shards are the text; and a tokenizer that exists can be used."""
    texts = ["Ein Satz, 2026.\n" * 1000, "Größe, 你好\n" * 500]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    options = "--text 0.txt 1.txt --vocab_size 300 --shard_tokens"
    result = prepare(tmp_path, f"tokens {options} 1000")
    assert result.returncode == 0 and not result.stderr, result.stderr
    shards = sorted((tmp_path / "tokens").glob("*.uint16"))
    sizes = [path.stat().st_size for path in shards]
    assert len(sizes) > 2 and set(sizes[:-1]) == {2000} and sizes[-1] <= 2000
    data = b"".join(path.read_bytes() for path in shards)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint16).tolist()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert text == "".join(text + END for text in texts)
    assert tokenizer.encode("2026<|user|>").tokens == ["2", "0", "2", "6", "<|user|>"]
    dataset = TextDataset(shards[0], 10, 300)
    assert [chunk.tolist() for chunk in dataset[3]] == [tokens[30:40], tokens[31:41]]
    assert len(pickle.dumps(dataset)) < 1000  # what a worker gets is not the tokens
    assert (
        f"{len(tokens):,} tokens of {tokenizer.get_vocab_size()} in {len(shards)} files"
        in result.stdout
    )

    result = prepare(tmp_path, f"other {options} 10000 --tokenizer tokens/tokenizer.json")
    assert result.returncode == 0, result.stderr
    other = b"".join(path.read_bytes() for path in sorted((tmp_path / "other").glob("*.uint16")))
    assert other == data


def test_bad_input(tmp_path, shell):
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "latin1").write_bytes(b"gr\xfcn\n")
    for options, message in [
        (f"{tmp_path} --text text", f"{tmp_path} exists: name another folder, or delete it"),
        ("tokens --text missing", "cannot read --text missing"),
        ("tokens --text text --vocab_size 259", "--vocab_size must be 260 or more"),
    ]:
        result = prepare(tmp_path, options)
        assert result.returncode == 2 and message in result.stderr.splitlines()[-1]
    save_tokenizer(tmp_path / "tokenizer.json", 10)  # without END
    result = prepare(tmp_path, "tokens --text text --tokenizer tokenizer.json")
    assert result.stderr == f"--tokenizer has no token {END}: give it another --end_token\n"
    for options, message in [
        ("tokens --text text --tokenizer missing", "cannot read --tokenizer missing: "),
        ("text/tokens --text text", "cannot write text/tokens: "),
        ("tokens --text text latin1", "--text latin1 is not UTF-8: convert it, such as with iconv"),
    ]:
        result = prepare(tmp_path, options)
        assert result.returncode == 1 and result.stderr.startswith(message)
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "tokens").exists()
    shell.ranks("gpt/tokens.py").fails(
        "no tokens in --data tokens: start gpt/prepare_tokens.py first"
    )
    assert prepare(tmp_path, "tokens --text text").returncode == 0
    shell.ranks("gpt/tokens.py").fails("--data has 0 chunks: 1024 are for validation, add text")
    shard = tmp_path / "tokens" / "000000.uint16"
    (tmp_path / "tokens" / "1.uint16").symlink_to("gone")
    shell.ranks("gpt/tokens.py").fails("cannot read --data tokens: ", "No such file", "1.uint16")
    (tmp_path / "tokens" / "1.uint16").unlink()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{")
    shell.ranks("gpt/tokens.py").fails("cannot read --data tokens: ")
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokens" / "tokenizer.json"))
    shell.ranks("gpt/tokens.py").fails("it has no token for the end of a line: set --generate 0")
    shard.rename(tmp_path / "tokens" / "000000.bin")
    shell.ranks("gpt/tokens.py").fails("no tokens in --data tokens: ")


def save_tokenizer(path, size):
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(size)}, "0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.save(str(path))


def test_vocabulary_of_llama_3(shell):
    """128,256 tokens need 32 bits; a number that the tokenizer does not know gets a line."""
    numbers = [*range(128_000, 128_256)] * 2
    (shell.folder / "text").write_text(" ".join(map(str, numbers)))
    save_tokenizer(shell.folder / "tokenizer.json", 128_256)
    options = "--text text --tokenizer tokenizer.json --end_token 128255"
    result = prepare(shell.folder, f"tokens {options}")
    assert "513 tokens of 128,256 in 1 files" in result.stdout, result.stderr
    (shard,) = (shell.folder / "tokens").glob("*.uint32")
    tokens = torch.frombuffer(bytearray(shard.read_bytes()), dtype=torch.uint32).tolist()
    assert tokens == [*numbers, 128_255]
    options = f"1 1 --data tokens {TINY} --context 8 --val_tokens 8 --batch_size 16"
    script = patch(shell.folder, "gpt/tokens.py", SHORT_GPT)
    shell.ranks(f"{script} {options}").succeeds()
    assert load_gpt(shell.folder / "snapshot")["shape"].endswith("vocab_size=128256")
    save_tokenizer(shell.folder / "tokens" / "tokenizer.json", 128_200)
    job = shell.ranks(f"{script} {options} --snapshot_path other")
    job.fails(f"{shard.relative_to(shell.folder)} has token ", "tokenizer.json only 128200")


def test_padding_of_the_vocabulary():
    """The rows up to a multiple of 128 give no logits, and get no gradient."""
    model = GPT(gpt_config(1, 2, 16, 8), 300)
    assert len(model.head.weight) == len(model.token_embedding.weight) == 384
    tokens = torch.arange(16).view(2, 8)
    logits = model(tokens)
    assert logits.shape == (2, 8, 300)
    loss = next_token_loss(logits, tokens)
    loss.backward()
    expected = cross_entropy(logits.view(16, 300), tokens.view(16))
    assert torch.equal(loss, expected)
    assert model.head.weight.grad[:300].any() and not model.head.weight.grad[300:].any()


VAL_CHUNKS, CONTEXT, CHUNKS = 8, 8, 184
# Each rank prints which chunk it trains at which position of the epoch.
LOG_CHUNKS = f"""
script.GPT.generate = lambda self, *args: ""
@before(script.Trainer, "_run_batch")
def log_chunks(self, inputs, targets):
    world_size, rank = script.dist.get_world_size(), script.dist.get_rank()
    for row, chunk in enumerate(inputs):
        position = self.samples_run + row * world_size + rank
        print(f"at {{self.epochs_run}} {{position}}: chunk {{chunk[0].item() // {CONTEXT}}}")
"""


def test_resumed_on_other_ranks(shell):
    """Three shards; stopped on 2 ranks, then on 1, ended on 3: each chunk at its position, once."""
    folder = shell.folder / "tokens"
    folder.mkdir()
    save_tokenizer(folder / "tokenizer.json", 2000)
    tokens = torch.arange((CHUNKS + VAL_CHUNKS) * CONTEXT + 1).to(torch.uint16)
    starts = [0, 50 * CONTEXT, 120 * CONTEXT, len(tokens)]
    for number in range(3):
        # A chunk's last target is the first token of the next one, so the shards overlap by it.
        shard = tokens[starts[number] : starts[number + 1] + 1]
        (folder / f"{number}.uint16").write_bytes(shard.numpy().tobytes())
    script = patch(shell.folder, "gpt/tokens.py", LOG_CHUNKS + SIGNAL)

    def start(ranks, name, **variables):
        options = f"--data tokens --context {CONTEXT} --batch_size {12 // ranks} {TINY}"
        options += f" --val_tokens {VAL_CHUNKS * CONTEXT}"
        return shell.ranks(f"{script} 2 1 {options} --snapshot_path {name}", ranks, **variables)

    undisturbed = start(1, "one.pt").succeeds()
    outputs = []
    for ranks, signal_at in [(2, 36), (1, 132)]:
        job = start(ranks, "several.pt", SIGNAL="15", SIGNAL_AT=f"0 {signal_at}")
        job.fails("stopped by a signal")
        outputs.append(job.output)
    outputs.append(start(3, "several.pt").succeeds())

    def chunks(output):
        return re.findall(r"at (\d) (\d+): chunk (\d+)", output)

    expected = [(e, p, c) for e, p, c in chunks(undisturbed) if int(p) < CHUNKS]
    assert len(expected) == 2 * CHUNKS and len({(e, c) for e, _, c in expected}) == 2 * CHUNKS
    found = [(e, p, c) for output in outputs for e, p, c in chunks(output) if int(p) < CHUNKS]
    assert sorted(found) == sorted(expected)
