"""Export a snapshot of gpt/llama.py for transformers: export.py SNAPSHOTS TOKENS FOLDER

Writes into FOLDER the newest complete snapshot in SNAPSHOTS, with TOKENS/tokenizer.json and a
template for chats. It is one process, without torchrun, and holds the model once.
"""

import argparse
import ast
import os
import sys
import warnings
from pathlib import Path

import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if tools or message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no place for tools, or for ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshots", type=Path, help="--snapshot_path of the run, or one in it")
    parser.add_argument("tokens", type=Path, help="its --data")
    parser.add_argument("folder", help="where to write")
    args = parser.parse_args()
    for name in ("tokenizer.json", "end_token.txt"):
        if not (args.tokens / name).is_file():
            parser.error(f"no {name} in {args.tokens}: it comes from gpt/prepare_tokens.py")
    parent = os.path.dirname(args.folder) or "."
    if not args.folder or os.path.isfile(args.folder) or not os.access(parent, os.W_OK):
        parser.error(f"cannot write {args.folder}: create its folder, or name another one")
    return args


def read_sizes(snapshot):
    """Returns the sizes of the model, by the names of gpt/llama.py's arguments."""
    saved = {"shape": ""}
    dcp.load(saved, checkpoint_id=snapshot)
    sizes = {}
    for size in saved["shape"].split(", "):
        name, value = size.split("=")
        sizes[name] = ast.literal_eval(value)  # a number, True or False
    return sizes


def make_model(sizes, padded_vocab_size, end_id):
    config = LlamaConfig(
        vocab_size=padded_vocab_size,
        hidden_size=sizes["n_embd"],
        intermediate_size=sizes["n_hidden"],
        num_hidden_layers=sizes["n_layer"],
        num_attention_heads=sizes["n_head"],
        num_key_value_heads=sizes["n_kv_head"],
        max_position_embeddings=sizes["context"],
        rms_norm_eps=sizes["norm_eps"],
        rope_theta=sizes["rope_theta"],
        tie_word_embeddings=sizes["tie_word_embeddings"],
        bos_token_id=end_id,  # a text begins where another ends
        eos_token_id=end_id,
    )
    return LlamaForCausalLM(config)


def main(args):
    warnings.filterwarnings("ignore", ".*load in a single process")  # which this script means to do
    complete = [path.parent for path in args.snapshots.glob("epoch_[0-9]*/.metadata")]
    if (args.snapshots / ".metadata").is_file():
        complete = [args.snapshots]
    if not complete:
        sys.exit(f"no complete snapshot in {args.snapshots}")
    snapshot = max(complete)  # the newest
    saved = dcp.FileSystemReader(snapshot).read_metadata().state_dict_metadata
    sizes = read_sizes(snapshot)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(args.tokens / "tokenizer.json"),
        eos_token=(args.tokens / "end_token.txt").read_text().strip(),
        chat_template=CHAT_TEMPLATE,
    )
    padded_vocab_size = saved["model.model.embed_tokens.weight"].size[0]
    model = make_model(sizes, padded_vocab_size, tokenizer.eos_token_id)
    weights = model.state_dict()
    known = {f"model.{name}" for name in weights}
    unknown = {name for name in saved if name.startswith("model.")} - known
    if unknown:
        sys.exit(f"weights that a Llama does not have: {unknown}")
    dcp.load({"model": weights}, checkpoint_id=snapshot)  # into the tensors of `model`
    model.resize_token_embeddings(sizes["vocab_size"])  # without the padding
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)


if __name__ == "__main__":
    main(parse_args())
