"""Turn text into files of tokens, for gpt/tokens.py: prepare_tokens.py FOLDER --text FILE...

Writes FOLDER/tokenizer.json, and FOLDER/000000.uint16 and so on with the ids of the tokens, of 16
bits each, or of 32 (.uint32) for a vocabulary above 65,536. The --end_token follows each text file
or, in a .jsonl or .json file, the "text" of each line. FOLDER/end_token.txt names it, and sizes.txt
lists the files and their sizes, which gpt/tokens.py checks.
Without --tokenizer, it first trains one on the text: byte pair encoding, as in GPT-2.
Started again after a kill, it continues after the last complete file.
"""

import argparse
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import threading
from array import array
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

PIECE_SIZE = 100_000  # characters
BATCH_SIZE = 64  # pieces that a worker encodes at once
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]  # a chat's messages begin with these


def train_tokenizer(paths, vocab_size, end_token):
    """Returns a byte-level BPE tokenizer, which encodes any text and decodes it unchanged.

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
    """Yields each document in pieces, to the end of a line if it is near, then an empty piece."""
    for path in paths:
        try:
            if path.suffix.lower() in (".jsonl", ".json"):
                yield from texts_of_lines(path)
                continue
            with open(path, encoding="utf-8-sig", newline="") as file:  # unchanged, including \r\n
                while piece := file.read(size):
                    yield piece + file.readline(size)
        except UnicodeDecodeError as error:
            sys.exit(f"--text {path} is not UTF-8: convert it, such as with iconv ({error})")
        yield ""


def texts_of_lines(path):
    """Yields the "text" of each line that is not blank, then an empty piece."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # fails on half of a surrogate pair
            except (ValueError, TypeError, KeyError, AttributeError):
                sys.exit(f'--text {path}, line {number} is not like {{"text": "Once upon a time"}}')
            if text:
                yield text
            yield ""


def batches(paths, size, file, piece):
    """Yields the start and the pieces of each batch, beginning at this file and piece."""
    for number in tqdm(range(file, len(paths)), unit="file", disable=None):
        texts = itertools.islice(pieces([paths[number]], size), piece, None)
        while batch := list(itertools.islice(texts, BATCH_SIZE)):
            yield (number, piece), batch
            piece += len(batch)
        piece = 0


def start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the main process
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent():
    """Ends a worker whose main process was killed; it would live on otherwise."""
    parent_process().join()
    os._exit(1)


@functools.cache  # once per process
def load_tokenizer(path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # this setting is not in the file
    return tokenizer


def encode(texts, tokenizer_path, end_token, typecode):
    tokenizer = load_tokenizer(tokenizer_path)
    tokens = array(typecode)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for text, encoding in zip(texts, encodings, strict=True):
        tokens.extend(encoding.ids if text else [tokenizer.token_to_id(end_token)])
    return tokens


def encode_all(batches, num_workers, *options):
    """Yields the start of each batch and a future of its tokens, in order."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads scale worse, see tokenizers#1900
    with ProcessPoolExecutor(num_workers, get_context("spawn"), start_worker) as executor:
        pending = deque()
        for start, texts in batches:
            pending.append((start, executor.submit(encode, texts, *options)))
            if len(pending) > 2 * num_workers:  # more would only fill the memory
                yield pending.popleft()
        yield from pending


def write_shards(encoded, tokens, folder, progress, shard_tokens):
    """Writes all tokens into files of `shard_tokens`, the last with fewer; returns both counts."""
    ending = f"uint{8 * tokens.itemsize}"
    shards = progress["shards"]
    skip = progress["skip"]
    for start, future in encoded:
        batch = future.result()
        tokens.extend(batch[skip:])
        skip = 0
        while len(tokens) >= shard_tokens:
            write(folder, f"tokens/{shards:06}.{ending}", tokens[:shard_tokens])
            del tokens[:shard_tokens]
            shards += 1
            progress |= {"shards": shards, "start": start, "skip": len(batch) - len(tokens)}
            write(folder, "progress.json", json.dumps(progress).encode())
    total = shards * shard_tokens + len(tokens)
    sizes = [shard_tokens] * shards
    if tokens:
        write(folder, f"tokens/{shards:06}.{ending}", tokens)
        sizes.append(len(tokens))
    lines = [f"{n:06}.{ending} {size * tokens.itemsize}\n" for n, size in enumerate(sizes)]
    write(folder, "tokens/sizes.txt", "".join(lines).encode())  # gpt/tokens.py checks them
    return total, len(sizes)


def write(folder, name, data):
    """Writes a file that is complete once it has its name."""
    partial = folder / f"{os.getpid()}.partial"
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / name)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tokenizer", help="a tokenizer.json, such as a model's on the hub")
    parser.add_argument("--end_token", default="<|endoftext|>", help="ends each document")
    parser.add_argument("--vocab_size", type=int, default=4096, help="of the tokenizer to train")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per file")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    parser.add_argument("--num_workers", type=int, default=cores, help="processes that encode")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists: name another folder, or delete it")
    if args.vocab_size < 260 or args.shard_tokens < 1 or args.num_workers < 1:
        parser.error("--vocab_size must be 260 or more, --shard_tokens and --num_workers 1 or more")
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
    tokenizer.encode_special_tokens = True  # an end token in a text is plain text
    if end_id in tokenizer.encode(args.end_token, add_special_tokens=False).ids:
        sys.exit(f"--end_token {args.end_token} also stands for a text: name a special token")
    return tokenizer


def piece_size(tokenizer):
    """Returns the size of a piece, or -1 (the whole document) if pieces have different tokens."""
    line = tokenizer.encode("a\n", add_special_tokens=False).ids
    lines = tokenizer.encode("a\na\n", add_special_tokens=False).ids
    return PIECE_SIZE if lines == line + line else -1  # such as with a space before each text


def settings(args):
    """Returns everything that determines the tokens."""
    names = ("tokenizer", "end_token", "vocab_size", "shard_tokens")
    result = {f"--{name}": getattr(args, name) for name in names}
    result["--text"] = " ".join(map(str, args.text))
    for path in [*args.text, Path(args.tokenizer or args.text[0])]:
        stat = path.stat()
        result[str(path)] = f"of {stat.st_size} bytes, modified at {stat.st_mtime}"
    return result


def start_or_continue(args, folder):
    """Returns how far the tokens in the folder go."""
    if (folder / "tokens").exists():
        progress = json.loads((folder / "progress.json").read_text())
        before = progress["settings"]
        for name, now in settings(args).items():
            if now != before.get(name):
                change = f"{name} was {before.get(name)} and is {now}"
                sys.exit(f"cannot continue {folder}: {change}; set it back, or delete the folder")
        return progress
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_tokenizer(args).save(str(folder / "tokenizer.json"))
    progress = {"shards": 0, "start": (0, 0), "skip": 0, "settings": settings(args)}
    write(folder, "progress.json", json.dumps(progress).encode())
    (folder / "tokens").mkdir()
    return progress


def main(args):
    if not any(pieces(args.text)):
        sys.exit("--text has no text: each document is empty")
    unfinished = args.folder.with_name(f"{args.folder.name}.tmp")
    tokenizer_path = unfinished / "tokenizer.json"
    try:
        progress = start_or_continue(args, unfinished)
        tokenizer = load_tokenizer(tokenizer_path)
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        tokens = array("H") if vocab_size <= 2**16 else array("I")  # unsigned
        texts = batches(args.text, piece_size(tokenizer), *progress["start"])
        options = (tokenizer_path, args.end_token, tokens.typecode)
        encoded = encode_all(texts, args.num_workers, *options)
        total, shards = write_shards(encoded, tokens, unfinished, progress, args.shard_tokens)
        write(unfinished, "tokens/end_token.txt", args.end_token.encode())
        shutil.copy(tokenizer_path, unfinished / "tokens")
        (unfinished / "tokens").rename(args.folder)  # now it is complete
        shutil.rmtree(unfinished)
    except OSError as error:
        sys.exit(f"cannot write {args.folder}: {error}")
    except BrokenProcessPool:
        sys.exit("a worker was killed: start again, with fewer --num_workers if memory is short")
    print(f"{total:,} tokens of {vocab_size:,} in {shards} files: {args.folder}")


if __name__ == "__main__":
    main(parse_args())
