"""Turn text into files of tokens, for gpt/tokens.py: prepare_tokens.py FOLDER --text FILE...

Writes FOLDER/tokenizer.json, and FOLDER/000000.uint16 and so on: the numbers of the tokens, two
bytes each. After each file of the text comes the token <|endoftext|>. Without --tokenizer, it first
trains one on the text: byte pair encoding, as in GPT-2.
"""

import argparse
import os
import shutil
import sys
from array import array
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

END = "<|endoftext|>"
MAX_VOCAB_SIZE = 65536  # of numbers of two bytes


def train_tokenizer(paths, vocab_size):
    """Returns a byte-level BPE tokenizer: any text can be encoded, and decoded as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(paths), trainer)
    return tokenizer


def lines(paths):
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from file


def encode(tokenizer, path):
    """Yields the tokens of a file, a million characters at a time, up to the end of a line."""
    with open(path, encoding="utf-8", errors="replace") as file:
        while some_lines := file.readlines(1_000_000):
            yield tokenizer.encode("".join(some_lines), add_special_tokens=False).ids
    yield [tokenizer.token_to_id(END)]


def write_shards(tokenizer, paths, folder, shard_tokens):
    """Writes all tokens into files of `shard_tokens` each, the last with fewer; returns both."""
    tokens = array("H")  # unsigned, two bytes
    shards = 0
    total = 0
    for path in tqdm(paths, unit="file", disable=None):
        for ids in encode(tokenizer, path):
            tokens.extend(ids)
            total += len(ids)
            while len(tokens) >= shard_tokens:
                (folder / f"{shards:06}.uint16").write_bytes(tokens[:shard_tokens])
                del tokens[:shard_tokens]
                shards += 1
    if tokens:
        (folder / f"{shards:06}.uint16").write_bytes(tokens)
        shards += 1
    return total, shards


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokenizer", help="a tokenizer.json, such as of a model on the hub")
    parser.add_argument("--vocab_size", type=int, default=4096, help="of the one to train")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="per file")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists: name another folder, or delete it")
    if not 257 <= args.vocab_size <= MAX_VOCAB_SIZE or args.shard_tokens < 1:
        parser.error(f"--vocab_size must be 257 to {MAX_VOCAB_SIZE}, --shard_tokens 1 or more")
    for path in args.text:
        if not path.is_file() or not os.access(path, os.R_OK):
            parser.error(f"cannot read --text {path}")
    return args


def make_tokenizer(args):
    """Reads the tokenizer, or trains one; exits if it does not fit."""
    if not args.tokenizer:
        return train_tokenizer(args.text, args.vocab_size)
    try:
        tokenizer = Tokenizer.from_file(args.tokenizer)
    except Exception as error:
        sys.exit(f"cannot read --tokenizer {args.tokenizer}: {error}")
    if tokenizer.get_vocab_size() > MAX_VOCAB_SIZE or tokenizer.token_to_id(END) is None:
        sys.exit(f"--tokenizer needs the token {END} and at most {MAX_VOCAB_SIZE:,} tokens")
    return tokenizer


def main(args):
    unfinished = args.folder.with_name(f"{args.folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        tokenizer = make_tokenizer(args)
        total, shards = write_shards(tokenizer, args.text, unfinished, args.shard_tokens)
        tokenizer.save(str(unfinished / "tokenizer.json"))
        unfinished.rename(args.folder)  # now it is complete
    except OSError as error:
        sys.exit(f"cannot write {args.folder}: {error}")
    print(f"{total:,} tokens of {tokenizer.get_vocab_size():,} in {shards} files: {args.folder}")


if __name__ == "__main__":
    main(parse_args())
