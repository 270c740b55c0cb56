"""What the tests of the files of gpt/ share: tiny models, their data, and a run on any layout."""

import math
import re
import signal

import pytest
from helpers import (
    PLAIN_SGD,
    SHORT_GPT,
    SHORT_VAL,
    SIGNAL,
    VAL_CHUNKS,
    patch,
    read_script,
    run,
    weights_diff,
)

from tools.launch.snapshots import load_gpt, make_model, write_chats, write_text
from tools.launch.snapshots import save_tokenizer as save_tokenizer
from tools.launch.snapshots import write_tokens as write_tokens
from tools.steps import ROOT

TINY = "--n_layer 1 --n_head 2 --n_embd 16 --context 8"
TINY_BATCH = 16  # of all ranks together
TINY_CHUNKS = 182  # to train on: 11 global batches of 16 and one of 6


def prepare(folder, options):
    return run("python", ROOT / "gpt" / "prepare_tokens.py", *options.split(), folder=folder)


TOKENS = ["gpt/tokens.py", "gpt/llama.py", "gpt/documents.py", "gpt/chunked_loss.py"]
TOKENS.append("gpt/llama_tensor_parallel.py")
FINETUNE = ["gpt/finetune.py", "gpt/frozen_layers.py", "gpt/finetune_chat.py"]
OPTIONS = {
    "gpt/slow_network.py": "--compress",
    "gpt/local_sgd.py": "--sync_every 4",
    "gpt/tensor_parallel.py": "--tp_size 2",
    "gpt/llama_tensor_parallel.py": "--tp_size 2 --n_kv_head 2",
    "gpt/context_parallel.py": "--cp_size 2",
    "gpt/accumulate.py": "--micro_batch_size 2",
    "gpt/pipeline_parallel.py": "--pp_size 2 --micro_batches 2 --n_layer 2",
    "gpt/three_d.py": "--tp_size 2 --micro_batches 2",
    # All experts: of fewer, a token may select others in bfloat16 than in float32.
    **dict.fromkeys(["gpt/moe.py", "gpt/expert_parallel.py"], "--n_experts 2 --top_k 2"),
    **dict.fromkeys(FINETUNE, "--learning_rate 1e-3"),
    "gpt/documents.py": "--n_embd 32",
}
SIZE, CONTEXT = 48, 8  # chunks of a text


def data_options(folder, name):
    """Writes what a file of gpt/ learns, unless it is there; returns the options that say so."""
    chunks = SIZE + VAL_CHUNKS
    # Of a chat in 8 tokens, nothing would be left to learn.
    context = 40 if name == "gpt/finetune_chat.py" else CONTEXT
    options = f"--context {context}"
    if name != "gpt/gpt.py":
        options += f" --val_tokens {VAL_CHUNKS * context}"
    folder.mkdir(exist_ok=True)
    if name in TOKENS:
        write_tokens(folder / "tokens", chunks, context)
        return f"{TINY} {options} --data {folder}/tokens"
    if name == "gpt/finetune_chat.py":
        write_chats(folder / "text", chunks)
    else:
        write_text(folder / "text", chunks, context)
    options += f" --text {folder}/text"
    if name not in FINETUNE:
        return f"{TINY} {options}"
    if not (folder / "model").exists():
        make_model(folder / "model", "Llama")
    return f"{options} --model {folder}/model --export_path {folder}/exported"


def write_tiny_text(shell, val_chunks=VAL_CHUNKS, chunks=TINY_CHUNKS):
    write_text(shell.folder / "text", chunks + val_chunks, 8)


def tiny_options(shell, name):
    """Returns options for a tiny GPT, on a text of `TINY_CHUNKS` chunks to train on."""
    val_chunks, val_options = (0, "") if name == "gpt/gpt.py" else (VAL_CHUNKS, SHORT_VAL)
    write_tiny_text(shell, val_chunks)
    options = f"{TINY} {val_options} --batch_size {TINY_BATCH // 2} {OPTIONS.get(name, '')}"
    return f"{options} --text {shell.folder}/text --snapshot_path {shell.folder}"


def options_of(shell, name, options=None):
    """Returns the options of a script, with those of its data, unless it has that itself."""
    options = OPTIONS.get(name, "") if options is None else options
    if name.startswith("gpt/"):
        options = f"{data_options(shell.folder, name)} --batch_size 4 {options}"
    return options


BATCH_SIZE = 12  # of all ranks together, on 1, 2, 3 or 4
STEPS = 8  # per epoch
SMALL = "--n_layer 1 --n_head 4 --n_embd 32 --context 8"
LLAMA = ["llama.py", "documents.py", "chunked_loss.py", "llama_tensor_parallel.py"]
# A signal stops a run at the next fourth step, where `SIGNAL` has the tenth.
SIGNAL_AT_FOURTH = SIGNAL.replace("10", "4")
# AdamW turns a gradient that is nearly 0 into a whole step, and so rounding errors into differences
# of 1e-4. In float64 they stay small.
FLOAT64 = """
torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double  # which the loss casts logits to
clip_grad_norm_ = nn.utils.clip_grad_norm_
def clip_and_log(parameters, max_norm, **options):
    norm = clip_grad_norm_(parameters, max_norm, **options)
    print("clipped" if norm > max_norm else "not clipped")
    return norm
nn.utils.clip_grad_norm_ = clip_and_log
"""


def write_script(shell, name, setup=""):
    return patch(shell.folder, f"gpt/{name}", SHORT_GPT + setup)


def start(shell, name, snapshot, ranks=1, setup="", options="", steps=STEPS, epochs=1, **variables):
    """Starts epochs of some steps, with the same global batches on any number of ranks.

    `ranks` is their number, or the names of their nodes.
    """
    nodes = [""] * ranks if isinstance(ranks, int) else ranks
    folders = [shell.folder / node for node in nodes]
    chunks = int(steps * BATCH_SIZE) + VAL_CHUNKS
    if f"gpt/{name}" in TOKENS:
        data = f"--data {shell.folder}/tokens"
        write_tokens(shell.folder / "tokens", chunks, 8)
    else:
        data = f"--text {shell.folder}/text"
        write_text(shell.folder / "text", chunks, 8)
    sizes = map(int, re.findall(r"--[tpc]p_size (\d+)", options))  # of ranks that share samples
    options = f"{SHORT_VAL} {data} --snapshot_path {snapshot} {options}"
    options += f" --batch_size {BATCH_SIZE * math.prod(sizes) // len(folders)}"
    command = f"{write_script(shell, name, setup)} {epochs} 1 {SMALL} {options}"
    return shell.ranks_on(folders, command, **variables)


def signal_after(step, signum=signal.SIGTERM):
    """Returns the variables with which `SIGNAL` sends a signal after a step of the first epoch."""
    return {"SIGNAL": str(int(signum)), "SIGNAL_AT": f"0 {step * BATCH_SIZE}"}


# Of others, one layer.
SHAPES = {
    "pipeline_parallel.py": "--n_layer 4",
    "three_d.py": "--n_layer 2",
    "llama.py": "--n_layer 2 --n_kv_head 2",
    # One matrix in one FSDP group, which the embedding and the head both give a gradient.
    "documents.py": "--n_layer 2 --n_kv_head 2 --tie_word_embeddings",
    "chunked_loss.py": "--n_layer 2 --n_kv_head 2",
    "llama_tensor_parallel.py": "--n_layer 2 --n_kv_head 2 --tie_word_embeddings",
    "muon.py": "--n_layer 3",  # three matrices of each shape, for fewer ranks and for more
}
# What each reference does otherwise; and how the comparison in float32 goes.
OF_REFERENCE = {"muon.py": read_script("torch_muon.py")}
FLOAT32 = {
    **dict.fromkeys(LLAMA, (PLAIN_SGD, 0.1, 5e-5)),
    "muon.py": ("", 0.02, 5e-5),  # an optimizer of its own
}


def reference(name):
    """Returns the file whose weights on one rank those of `name` must equal."""
    if name in LLAMA:
        return name if name == "documents.py" else "llama.py"
    return "moe.py" if name in ("moe.py", "expert_parallel.py") else "pretrain.py"


def assert_split_is_one_rank(shell, name, layouts, change=""):
    """The weights after some steps, and the loss, of one rank and of several, with a `change`.

    In float64 with AdamW and clipping; and in float32 with neither, as both would hide it if the
    gradients of all steps were, say, twice too large.
    """
    float32 = FLOAT32.get(name, (PLAIN_SGD, 0.3, 5e-5))
    float64 = (FLOAT64, 0.01 if reference(name) == "llama.py" else 0.05, 1e-12)
    for n_setup, (setup, rate, tolerance) in enumerate([float64, float32]):
        options = f"{SHAPES.get(name, '')} --learning_rate {rate}"
        one = f"one_{n_setup}"
        twin = setup + OF_REFERENCE.get(name, "")
        output = start(shell, reference(name), one, setup=twin, options=options).succeeds()
        if setup == FLOAT64:
            assert 0 < output.count("\nclipped") < STEPS
        else:
            layouts = layouts[-1:]
        for n, (ranks, option) in enumerate(layouts):
            several = f"several_{n_setup}_{n}"
            job = start(shell, name, several, ranks, change + setup, f"{options} {option}")
            assert val_loss(job.succeeds()) == pytest.approx(val_loss(output), rel=1e-3)
            diff = weights_diff(shell, several, one)
            print(name, ranks, option, "differs from one rank by", diff)
            assert diff < tolerance
            losses = [load_gpt(shell.folder / path)["loss"] for path in (several, one)]
            assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def val_loss(output):
    """Returns the last loss on the validation set in the log, of four digits."""
    return float(re.findall(r"val loss (\S+)", output)[-1])
