"""Reads what the scripts save, and writes what they read."""

import json
import random
import re
import tempfile
from itertools import pairwise

import torch

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def write_text(path, chunks, context):
    """Writes so many chunks of random letters."""
    letters = random.Random(0).choices(b"abcdefgh", k=chunks * context + 1)
    new = path.with_name("new")
    new.write_bytes(bytes(letters))
    new.replace(path)  # a job may read the old one


def save_tokenizer(path, size, *special_tokens):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(size)}, "0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens([*special_tokens])
    tokenizer.save(str(path))


def write_tokens(folder, chunks, context):
    """Writes random tokens in three shards, and a tokenizer, unless there are some."""
    if folder.exists():
        return
    folder.mkdir()
    save_tokenizer(folder / "tokenizer.json", 300)
    (folder / "end_token.txt").write_text("0")
    random = torch.Generator().manual_seed(0)
    size = chunks * context + 1
    tokens = torch.randint(300, [size], generator=random)
    tokens[torch.rand(size, generator=random) < 0.1] = 0  # ends of documents
    tokens[5 * context : 6 * context] = 0  # without a target that counts
    tokens[-1] = 0
    # A chunk's last target is the first token of the next one, so the shards overlap by it.
    ends = [0, chunks // 4, chunks * 2 // 3, chunks]
    for number, (start, end) in enumerate(pairwise(ends)):
        shard = tokens[start * context : end * context + 1].to(torch.uint16)
        (folder / f"{number}.uint16").write_bytes(shard.numpy().tobytes())


def make_model(folder, kind, dtype=torch.bfloat16, **changes):
    """Saves a model with random weights, and a tokenizer of bytes and " a"; returns its size.

    In a chat, each message ends with the special token ";".
    """
    import transformers  # takes seconds
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, f"{kind}Config")(**CONFIG | changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="5MB")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*letters, "Ġa"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([";"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    return model.num_parameters()


def write_chats(path, count):
    """Writes chats whose answers have one to six words."""
    with open(path, "w") as file:
        for number in range(count):
            messages = [{"role": "user", "content": f"Say {number}!"}]
            messages.append({"role": "assistant", "content": f"{number} " * (1 + number % 6)})
            file.write(json.dumps({"messages": messages}) + "\n")


def load_gpt(path):
    """Returns a snapshot of gpt/ as whole tensors: of a file, or the last one in a folder."""
    if path.is_file():
        return load(path)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # takes a second

    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(max(path.glob("epoch_[0-9]*/.metadata")).parent, file.name)
        return torch.load(file.name, weights_only=False)


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def equal_snapshots(one, other):
    """Tells whether two snapshots are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            equal_snapshots(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_snapshots, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def max_abs_diff(results, others):
    """Returns the largest difference between the tensors of two lists."""
    return max((a - b).abs().max().item() for a, b in zip(results, others, strict=True))


def logged_positions(output):
    """Returns epoch and sample of each snapshot in a log."""
    found = re.findall(r"epoch (\d+)(?: \+ (\d+) samples)? \| .* \| sav(?:ed|ing) ", output)
    return [(int(epochs), int(samples or 0)) for epochs, samples in found]
