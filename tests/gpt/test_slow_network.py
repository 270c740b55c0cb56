"""gpt/slow_network.py: gradients in float16."""

from gpt_helpers import TINY, write_tiny_text
from helpers import PLAIN_SGD, SHORT_GPT, SHORT_VAL, patch

from tools.launch.snapshots import load, max_abs_diff


def test_compressed_is_close(shell):
    """float16 gradients change the weights, a little; without --compress, nothing changes."""
    results = []
    write_tiny_text(shell)
    options = f"1 {TINY} {SHORT_VAL} --batch_size 8 --text text --learning_rate 0.1"
    for name, option in [
        ("gpt/pretrain.py", ""),
        ("gpt/slow_network.py", "--bucket_cap_mb 1"),
        ("gpt/slow_network.py", "--compress"),
    ]:
        script = patch(shell.folder, name, SHORT_GPT + PLAIN_SGD)
        path = shell.folder / f"{len(results)}.pt"
        shell.ranks(f"{script} {options} {option} --snapshot_path {path}", 2).succeeds()
        results.append(load(path)["model"].values())
    plain, uncompressed, compressed = results
    assert max_abs_diff(plain, uncompressed) == 0
    assert 0 < max_abs_diff(plain, compressed) < 1e-3


def test_gradient_beyond_float16(shell):
    """The run stops before the step that would make every weight NaN."""
    write_tiny_text(shell)
    large_loss = "loss = script.next_byte_loss\nscript.next_byte_loss = lambda *x: 1e9 * loss(*x)"
    script = patch(shell.folder, "gpt/slow_network.py", SHORT_GPT + large_loss)
    job = shell.ranks(f"{script} 1 {TINY} {SHORT_VAL} --batch_size 8 --text text --compress", 2)
    job.fails("the gradient of step 1 is nan or inf")
    assert not (shell.folder / "snapshot.pt").exists()
