"""gpt/local_sgd.py: with a plain outer step it is DDP; its outer steps; other nodes."""

import pytest
import torch
from gpt_helpers import STEPS, start
from helpers import PLAIN_SGD, equal_snapshots, read_script

from tools.launch.snapshots import load, load_gpt, max_abs_diff


def start_local_sgd(shell, nodes, setup="", options="", **more):
    """Starts a training on nodes that share snapshots."""
    snapshot = f"{shell.folder}/local"
    return start(shell, "local_sgd.py", snapshot, nodes, setup, options, **more)


def test_synchronized_every_step_is_ddp(shell):
    """On two nodes of two ranks, with a plain mean and a linear optimizer, it is pretrain.py.

    The last outer step is the last step's, and not repeated.
    """
    options = "--learning_rate 0.3"
    start(shell, "pretrain.py", "ddp", 4, PLAIN_SGD, options).succeeds()
    options += " --sync_every 1 --outer_lr 1 --outer_momentum 0"
    setup = f"{PLAIN_SGD}before(script.Trainer, '_outer_step')(lambda self: print('outer step'))"
    output = start_local_sgd(shell, "aabb", setup, options).succeeds()
    assert output.count("outer step") == 4 * STEPS
    expected = load_gpt(shell.folder / "ddp")["model"]
    snapshot = load_gpt(shell.folder / "local")
    for node in ("node_0", "node_1"):
        model = snapshot[node]["model"]
        diff = max_abs_diff([model[name] for name in expected], expected.values())
        print(node, "differs from pretrain.py by", diff)
        assert diff < 2e-6


@pytest.mark.long
def test_outer_step(shell):
    """After every third step, and the last, Nesterov's momentum moves all ranks to one point.

    Between nodes, each rank sends its own shards only: half of the model, where a node has two, in
    one all-reduce.
    """
    options = "--sync_every 3 --outer_lr 0.5 --outer_momentum 0.8"
    setup = read_script("record_outer_steps.py")
    start_local_sgd(shell, "aabb", setup, options, OUT=str(shell.folder)).succeeds()
    ranks = [load(shell.folder / f"history-{rank}") for rank in range(4)]
    assert [len(history) for history in ranks] == [STEPS // 3 + 1] * 4
    outer = ranks[0][0][0]
    velocity = torch.zeros_like(outer)
    for records in zip(*ranks, strict=True):
        before, weights, sizes, after = zip(*records, strict=True)
        assert max_abs_diff(before, [outer] * 4) < 1e-6
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
        assert not torch.equal(weights[0], weights[2])
        change = (weights[0] + weights[2]) / 2 - outer
        velocity = 0.8 * velocity + change
        outer = outer + 0.5 * (change + 0.8 * velocity)
        assert all(torch.equal(after[0], other) for other in after)
        assert max_abs_diff(after[:1], [outer]) < 1e-6
        for rank_sizes in sizes:
            assert rank_sizes == [(len(outer) / 2, 2)]


def test_gradient_of_a_node_is_nan(shell):
    """All nodes end, and name the step."""
    job = start_local_sgd(shell, "ab", read_script("bad_norm.py"), "--save_every_steps 3")
    job.fails("the gradient of step 4 is nan or inf")
    assert job.output.count("the gradient of step 4 ") == 2, job.output


@pytest.mark.long
def test_local_sgd_on_other_nodes(shell):
    """Each node has a state of its own: it resumes on more ranks per node, not on other nodes.

    All have ended with the same weights, also where an evaluation and a step that is left out came
    before the last outer step.
    """
    options = f"--sync_every 3 --eval_every_steps {STEPS - 1} --skip_steps {STEPS}"
    start_local_sgd(shell, "ab", options=options).succeeds()
    ends = [load_gpt(shell.folder / "local")[node]["model"] for node in ("node_0", "node_1")]
    assert equal_snapshots(*ends)
    job = start_local_sgd(shell, "abc", epochs=2)
    job.fails("cannot load ", ": move it or set another --snapshot_path")
    assert "node_2" in job.output
    job = start_local_sgd(shell, "aa", epochs=2)
    job.fails("cannot load ", ": move it or set another --snapshot_path")
    assert "saved by more nodes" in job.output
    output = start_local_sgd(shell, "aabb", epochs=2).succeeds()
    assert "1 of 2 epochs done" in output
