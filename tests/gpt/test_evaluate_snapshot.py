"""gpt/evaluate_snapshot.py: on the same text, it has the val loss of the run."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpt_helpers import FLOAT64, save_tokenizer, start
from helpers import VAL_CHUNKS, first, gpt_config, module

from gpt import evaluate_snapshot
from tools.steps import ROOT

# The script logs four digits of the val loss.
LOG_VAL_LOSS = """
@after(script.Trainer, "_evaluate")
def log_val_loss(self):
    print(f"in full {script.total_loss / len(self.val_loader.dataset)!r}\\n", end="")
@after(script.dist, "all_reduce")
def keep(tensor, *operation):
    script.total_loss = tensor.tolist()
"""


def cut_val_texts(folder):
    """Writes what a run has evaluated into texts of their own; returns options, and their size."""
    if (folder / "text").exists():
        text = (folder / "text").read_bytes()
        (folder / "val").write_bytes(text[-VAL_CHUNKS * 8 - 1 :])
        return "--text val", VAL_CHUNKS * 8 + 1
    for path in folder.glob("tokens/*.uint16"):  # a third of it is in each of three files
        tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint16).tolist()
        words = map(str, tokens[-VAL_CHUNKS // 3 * 8 - 1 :])
        (folder / f"val{path.stem}").write_text(" ".join(words))
    return "--text val0 val1 val2 --tokenizer tokens/tokenizer.json", VAL_CHUNKS * 8 + 3


@pytest.mark.parametrize(
    ("name", "setup", "tolerance"),
    first(
        3,
        [
            ("pretrain.py", FLOAT64, 1e-12),
            ("fsdp.py", "", 1e-6),
            ("llama.py", FLOAT64, 1e-12),
            ("tokens.py", FLOAT64, 1e-12),
            ("expert_parallel.py", FLOAT64, 1e-12),
        ],
    ),
)
def test_val_loss(shell, monkeypatch, capsys, name, setup, tolerance):
    """Two ranks log it, and save its weights in shards."""
    output = start(shell, name, "s", 2, LOG_VAL_LOSS + setup, steps=4).succeeds()
    val_loss = float(re.findall(r"in full (\S+)", output)[-1])
    options, num_tokens = cut_val_texts(shell.folder)
    if setup == FLOAT64:
        torch.set_default_dtype(torch.float64)
    monkeypatch.chdir(shell.folder)
    newest = evaluate_snapshot.find_newest(Path("s"))
    assert evaluate_snapshot.find_newest(newest) == newest
    monkeypatch.setattr("sys.argv", ["", "s", *f"{options} --batch_size 5".split()])
    losses = []
    mean_loss = evaluate_snapshot.mean_loss

    def keep_loss(*arguments):
        losses.append(mean_loss(*arguments))
        return losses[0]

    monkeypatch.setattr(evaluate_snapshot, "mean_loss", keep_loss)
    evaluate_snapshot.main(evaluate_snapshot.parse_args())
    assert losses == [pytest.approx(val_loss, rel=tolerance, abs=0)]
    num_bytes = sum(path.stat().st_size for path in shell.folder.glob("val*"))
    bits = val_loss / math.log(2) * num_tokens / num_bytes
    numbers = f"loss {val_loss:.4g} | perplexity {math.exp(val_loss):.4g} | {bits:.4g} bits"
    assert f" | 96 tokens | {numbers} per byte\n" in capsys.readouterr().out
    assert f"val loss {val_loss:.4g}\n" in output


LLAMA = {"n_kv_head": 1, "n_hidden": 32, "rope_theta": 1e4, "norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("empty --text long", "no complete snapshot in empty"),
        ("bytes.pt --text short short", "no file of --text has 9 tokens: add text"),
        ("bytes.pt --text long --tokenizer 20", "this model learned bytes: leave out --tokenizer"),
        ("llama --text long", "this model learned tokens: set --tokenizer"),
        ("llama --text long --tokenizer 20", "the tokenizer has 20 tokens, the model 30"),
        ("llama --text long --script tokens.py", "cannot load llama/epoch_0001: is its GPT your"),
        ("llama --text long --script tokens.py", "the GPT lacks ['model.lm_head.weight', 'mo"),
        ("bytes.pt --text long --script moe.py", "no attribute 'n_experts'"),
        ("bytes.pt --text long --script chats.py", "KeyError('GPT')"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # of dcp.save, in one process
def test_bad_input(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    model = module("gpt/pretrain.py").GPT(gpt_config(1, 1, 8, 8))
    torch.save({"model": model.state_dict(), "shape": model.shape}, "bytes.pt")
    config = gpt_config(1, 1, 8, 8, **LLAMA, tie_word_embeddings=False)
    model = module("gpt/llama.py").GPT(config, 30)
    snapshot = {"model": model.state_dict(), "shape": model.shape}
    dcp.save(snapshot, checkpoint_id="llama/epoch_0001")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_text("8 bytes.")
    (tmp_path / "long").write_text("more than 8 bytes")
    save_tokenizer(tmp_path / "20", 20)
    for name in ("tokens.py", "moe.py", "chats.py"):
        (tmp_path / name).symlink_to(ROOT / "gpt" / name)
    monkeypatch.setattr("sys.argv", ["", *arguments.split()])
    with pytest.raises(SystemExit) as exit:
        evaluate_snapshot.main(evaluate_snapshot.parse_args())
    assert message in exit.value.code
