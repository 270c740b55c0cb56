"""Turn text into files of tokens, for gpt/tokens.py: prepare_tokens.py FOLDER --text FILE...

Writes FOLDER/tokenizer.json, and FOLDER/000000.uint16 and so on: the numbers of the tokens, of 16
bits each, or of 32 (.uint32) for a vocabulary above 65,536. After each file of the text comes the
--end_token; of a .jsonl or .json file, after the "text" of each line.
Without --tokenizer, it first trains one on the text: byte pair encoding, as in GPT-2.
"""

import argparse
import itertools
import json
import os
import shutil
import sys
from array import array
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

PIECE_SIZE = 100_000  # characters
BATCH_SIZE = 64  # pieces, which the cores share
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]  # whose messages begin so in a chat


def train_tokenizer(paths, vocab_size, end_token):
    """Returns a byte-level BPE tokenizer: any text can be encoded, and decoded as it was.

    Digits are never merged, and each role of a chat has a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),  # each a token, as in Llama 2
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_token, *ROLES],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(paths), trainer)
    return tokenizer


def pieces(paths, size=PIECE_SIZE):
    """Yields each document in pieces, to the end of a line if near, and then an empty one."""
    for path in paths:
        try:
            if path.suffix.lower() in (".jsonl", ".json"):
                yield from texts_of_lines(path)
                continue
            with open(path, encoding="utf-8-sig", newline="") as file:  # as it is, \r\n too
                while piece := file.read(size):
                    yield piece + file.readline(size)
        except UnicodeDecodeError as error:
            sys.exit(f"--text {path} is not UTF-8: convert it, such as with iconv ({error})")
        yield ""


def texts_of_lines(path):
    """Yields the "text" of each line that is not blank, and then an empty one."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # no half of a surrogate pair
            except (ValueError, TypeError, KeyError, AttributeError):
                sys.exit(f'--text {path}, line {number} is not like {{"text": "Once upon a time"}}')
            if text:
                yield text
            yield ""


def encode(tokenizer, texts, end_token):
    """Yields the tokens of each text; the library encodes those of a batch on all cores."""
    end_id = tokenizer.token_to_id(end_token)
    while batch := list(itertools.islice(texts, BATCH_SIZE)):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for text, encoding in zip(batch, encodings, strict=True):
            yield encoding.ids if text else [end_id]


def write_shards(tokens_of_pieces, vocab_size, folder, shard_tokens):
    """Writes all tokens into files of `shard_tokens` each, the last with fewer; returns both."""
    tokens = array("H") if vocab_size <= 2**16 else array("I")  # unsigned
    ending = f"uint{8 * tokens.itemsize}"
    shards = 0
    total = 0
    for ids in tokens_of_pieces:
        tokens.extend(ids)
        total += len(ids)
        while len(tokens) >= shard_tokens:
            (folder / f"{shards:06}.{ending}").write_bytes(tokens[:shard_tokens])
            del tokens[:shard_tokens]
            shards += 1
    if tokens:
        (folder / f"{shards:06}.{ending}").write_bytes(tokens)
        shards += 1
    return total, shards


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokenizer", help="a tokenizer.json, such as of a model on the hub")
    parser.add_argument("--end_token", default="<|endoftext|>", help="after each document")
    parser.add_argument("--vocab_size", type=int, default=4096, help="of the one to train")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="per file")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists: name another folder, or delete it")
    if args.vocab_size < 260 or args.shard_tokens < 1:
        parser.error("--vocab_size must be 260 or more, --shard_tokens 1 or more")
    if not args.end_token:
        parser.error("--end_token must not be empty")
    for path in args.text:
        if not path.is_file() or not os.access(path, os.R_OK):
            parser.error(f"cannot read --text {path}")
    return args


def make_tokenizer(args):
    """Reads the tokenizer, or trains one; exits if it does not fit."""
    if not args.tokenizer:
        tokenizer = train_tokenizer(args.text, args.vocab_size, args.end_token)
    else:
        try:
            tokenizer = Tokenizer.from_file(args.tokenizer)
        except Exception as error:
            sys.exit(f"cannot read --tokenizer {args.tokenizer}: {error}")
    end_id = tokenizer.token_to_id(args.end_token)
    if end_id is None:
        sys.exit(f"--tokenizer has no token {args.end_token}: give it another --end_token")
    tokenizer.no_truncation()  # some come with a limit of 512 tokens
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a text may contain the end token, and goes on
    if end_id in tokenizer.encode(args.end_token, add_special_tokens=False).ids:
        sys.exit(f"--end_token {args.end_token} also stands for a text: name a special token")
    return tokenizer


def piece_size(tokenizer):
    """Returns the size of a piece; -1, which is all of a document, if pieces have other tokens."""
    line = tokenizer.encode("a\n", add_special_tokens=False).ids
    lines = tokenizer.encode("a\na\n", add_special_tokens=False).ids
    return PIECE_SIZE if lines == line + line else -1  # such as with a space before each text


def main(args):
    if not any(pieces(args.text)):
        sys.exit("--text has no text: each document is empty")
    unfinished = args.folder.with_name(f"{args.folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        tokenizer = make_tokenizer(args)
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        size = piece_size(tokenizer)
        texts = pieces(tqdm(args.text, unit="file", disable=None), size)
        tokens = encode(tokenizer, texts, args.end_token)
        total, shards = write_shards(tokens, vocab_size, unfinished, args.shard_tokens)
        tokenizer.save(str(unfinished / "tokenizer.json"))
        unfinished.rename(args.folder)  # now it is complete
    except OSError as error:
        sys.exit(f"cannot write {args.folder}: {error}")
    print(f"{total:,} tokens of {vocab_size:,} in {shards} files: {args.folder}")


if __name__ == "__main__":
    main(parse_args())
