"""Evaluate a snapshot of a file of gpt/ on other text: evaluate_snapshot.py SNAPSHOTS --text FILE

Prints the mean loss on the newest complete snapshot in SNAPSHOTS. It is one process, without
torchrun, and holds the model once, in float32.
"""

import argparse
import ast
import math
import os
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshots", type=Path, help="--snapshot_path of the run, or one in it")
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of a run on tokens")
    parser.add_argument("--script", type=Path, help="a file with your own GPT, if you changed it")
    parser.add_argument("--batch_size", type=int, default=32, help="chunks at once")
    args = parser.parse_args()
    if args.batch_size < 1:
        parser.error("--batch_size must be 1 or more")
    for path in filter(None, [*args.text, args.tokenizer, args.script]):
        if not path.is_file() or not os.access(path, os.R_OK):
            parser.error(f"cannot read {path}")
    return args


def find_newest(snapshots):
    """Returns the newest complete snapshot in a folder; up to gpt/pretrain.py, it is a file."""
    if snapshots.is_file() or (snapshots / ".metadata").is_file():
        return snapshots
    complete = [path.parent for path in snapshots.glob("epoch_[0-9]*/.metadata")]
    if not complete:
        sys.exit(f"no complete snapshot in {snapshots}")
    return max(complete)


def make_model(shape, script):
    """Returns a GPT with the sizes that a snapshot names."""
    pairs = [size.split("=") for size in shape.split(", ")]
    sizes = {name: ast.literal_eval(value) for name, value in pairs}
    if script is None:
        name = "tokens.py" if "vocab_size" in sizes else "pretrain.py"
        if "n_kv_head" in sizes:
            name = "llama.py"
        if "n_experts" in sizes:
            name = "moe.py"
        script = Path(__file__).with_name(name)
    gpt_class = runpy.run_path(str(script))["GPT"]
    config = SimpleNamespace(**sizes, recompute=False)
    return gpt_class(config, config.vocab_size) if "vocab_size" in sizes else gpt_class(config)


def load_model(snapshot, script):
    if snapshot.is_file():
        saved = torch.load(snapshot, map_location="cpu", mmap=True, weights_only=True)
        model = make_model(saved["shape"], script)
        model.load_state_dict(saved["model"])
        return model
    saved = {"shape": ""}
    dcp.load(saved, checkpoint_id=snapshot)
    model = make_model(saved["shape"], script)
    weights = model.state_dict()
    names = dcp.FileSystemReader(snapshot).read_metadata().state_dict_metadata
    known = {f"model.{name}" for name in weights}
    unknown = {name for name in names if name.startswith("model.")} - known
    if unknown:
        raise ValueError(f"the GPT lacks {sorted(unknown)[:3]}")
    dcp.load({"model": weights}, checkpoint_id=snapshot)  # into the tensors of `model`
    return model


def read_tokens(path, tokenizer_path, vocab_size):
    """Returns the tokens of a file: without a tokenizer, its bytes."""
    if tokenizer_path is None:
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    from tokenizers import Tokenizer  # only a run on tokens needs it

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    size = max(tokenizer.get_vocab().values()) + 1
    if size != vocab_size:
        raise ValueError(f"the tokenizer has {size} tokens, the model {vocab_size}")
    tokenizer.no_truncation()  # some come with a limit of 512 tokens
    tokenizer.encode_special_tokens = True  # an end token in a text is plain text
    text = path.read_bytes().decode("utf-8-sig")  # unchanged, including \r\n
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)


@torch.no_grad()
def mean_loss(model, chunks, batch_size):
    """Returns the mean loss per token of chunks, each with the target of its last token."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).eval()
    total_loss = 0.0
    for batch in chunks.split(batch_size):
        tokens = batch.long().to(device)
        logits = model(tokens[:, :-1])
        if hasattr(model, "vocab_size"):
            logits = logits[..., : model.vocab_size]  # without the padding
        targets = tokens[:, 1:].flatten()
        total_loss += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    return total_loss / chunks[:, 1:].numel()


def main(args):
    warnings.filterwarnings("ignore", ".*load in a single process")  # which this script means to do
    snapshot = find_newest(args.snapshots)
    try:
        model = load_model(snapshot, args.script)
    except (Exception, dcp.CheckpointException) as error:
        sys.exit(f"cannot load {snapshot}: is its GPT your own? Set --script\n{error!r}")
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size and not args.tokenizer:
        sys.exit("this model learned tokens: set --tokenizer")
    if args.tokenizer and not vocab_size:
        sys.exit("this model learned bytes: leave out --tokenizer")
    try:
        texts = [read_tokens(path, args.tokenizer, vocab_size) for path in args.text]
    except Exception as error:
        sys.exit(f"cannot read --text: {error}")
    size = model.context + 1  # with the target of the last token
    chunks = [tokens.unfold(0, size, model.context) for tokens in texts if len(tokens) >= size]
    if not chunks:
        sys.exit(f"no file of --text has {size} tokens: add text")
    chunks = torch.cat(chunks)
    loss = mean_loss(model, chunks, args.batch_size)
    tokens_per_byte = sum(map(len, texts)) / sum(path.stat().st_size for path in args.text)
    bits = loss / math.log(2) * tokens_per_byte
    numbers = f"loss {loss:.4g} | perplexity {math.exp(loss):.4g} | {bits:.4g} bits per byte"
    print(f"{snapshot} | {len(chunks) * model.context:,} tokens | {numbers}")


if __name__ == "__main__":
    main(parse_args())
