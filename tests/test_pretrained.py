"""The code of docs/pretrained.md, in multinode.py: who downloads, and what all then have."""

import contextlib
import http.server
import queue
import re
import textwrap
import threading

import pytest
import torch
from helpers import fences, reference_run

import singlegpu
from tools.launch.jobs import TIMEOUT_S
from tools.launch.snapshots import load
from tools.steps import ROOT

PLACEHOLDER = "https://example.com/toy.pth"  # the address on the page


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.weights`, once `server.answer` is set; or 404 if there are none."""

    def do_GET(self):
        self.server.requests.put(self.path)
        assert self.server.answer.wait(TIMEOUT_S)
        if self.server.weights is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.weights)))
        self.end_headers()
        self.wfile.write(self.server.weights)

    def log_message(self, *_):
        """Prints nothing."""


@contextlib.contextmanager
def served(weights):
    """Serves a file; `requests` is a queue, and `answer` the event for which they wait."""
    server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
    server.weights = weights
    server.requests = queue.Queue()
    server.answer = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.answer.set()
        server.shutdown()
        thread.join(TIMEOUT_S)
        server.server_close()


@pytest.fixture(scope="module")
def pretrained():
    """A trained model's weights, and the losses of its ten epochs from scratch."""
    weights, _, losses = reference_run(10, 128)
    names = singlegpu.ToyModel().state_dict()
    return dict(zip(names, weights, strict=True)), losses


def serialized(state_dict, folder):
    torch.save(state_dict, folder / "served.pth")
    return (folder / "served.pth").read_bytes()


def script_of_the_page(folder, server, change=("", "")):
    """Returns the path of multinode.py as the page changes it, with one `change` to that code.

    Each rank also tells that it waits, and saves what it has before DDP makes all ranks equal.
    """
    functions, lines, *_ = fences("pretrained.md", "python")
    functions = functions.replace(PLACEHOLDER, f"http://localhost:{server.server_port}/toy.pth")
    gather = "    dist.all_gather_object(errors, error)"
    assert functions.count(gather) == 1
    functions = functions.replace(gather, f'    print("waits")\n{gather}')
    lines = lines.replace(*change)
    lines += f'torch.save(model.state_dict(), f"{folder}/rank{{dist.get_rank()}}.pt")\n'
    source = (ROOT / "multinode.py").read_text()
    for old, new in [
        ("def parse_args", f"{functions}\n\ndef parse_args"),
        ("    model = ToyModel().to(device)\n", textwrap.indent(lines, "    ")),
    ]:
        assert source.count(old) == 1
        source = source.replace(old, new)
    path = folder / "pretrained.py"
    path.write_text(source)
    return path


def answer(server, job, downloads):
    """Answers when `downloads` of the four ranks have asked, and the others wait for them."""
    for _ in range(downloads):
        server.requests.get(timeout=TIMEOUT_S)
    job.wait_for("waits", 4 - downloads)
    server.answer.set()


def two_nodes(shell):
    return [shell.folder / name for name in ("node1", "node1", "node2", "node2")]


ALONE = ("download_first(load_weights, local_rank)", "load_weights()")
RANK_0 = ("local_rank", "dist.get_rank()")


@pytest.mark.parametrize(
    ("cache", "change", "downloads"),
    [
        pytest.param("cache", ("", ""), 2, id="one per node"),
        pytest.param("../cache", RANK_0, 1, id="shared disk"),
        pytest.param("../cache", ALONE, 4, id="without it, all at once"),
    ],
)
def test_downloads(shell, pretrained, cache, change, downloads):
    """As many as documented, and then all ranks have the weights and train from them."""
    state_dict, losses = pretrained
    with served(serialized(state_dict, shell.folder)) as server:
        script = script_of_the_page(shell.folder, server, change)
        command = f"{script} 1 1 --snapshot_path {shell.folder}/snapshot.pt"
        job = shell.ranks_on(two_nodes(shell), command, TORCH_HOME=cache)
        answer(server, job, downloads)
        output = job.succeeds()
    assert server.requests.empty()
    for rank in range(4):
        loaded = load(shell.folder / f"rank{rank}.pt")
        assert loaded.keys() == state_dict.keys()
        assert all(torch.equal(loaded[name], state_dict[name]) for name in loaded)
    # The loss of its first epoch is below that of the tenth from scratch.
    assert float(re.search(r"epoch 1 \| loss (\S+)", output)[1]) < losses[9]


def test_failed_download_ends_all_ranks(shell):
    """Every rank ends by itself, with status 1 and one line, although only two have the error."""
    with served(None) as server:
        script = script_of_the_page(shell.folder, server)
        job = shell.ranks_on(two_nodes(shell), f"{script} 1 1", TORCH_HOME="cache")
        answer(server, job, downloads=2)
        for rank in job.ranks:  # unlike job.wait, which ends the other ranks of a node
            rank.join(TIMEOUT_S)
        assert [rank.exitcode for rank in job.ranks] == [1] * 4, job.output
    assert server.requests.empty()
    progress = re.compile(r"rank \d of 4 starts on |waits$|Downloading: ")
    lines = [line for line in job.output.splitlines() if not progress.match(line)]
    message = "HTTPError 404: 'Not Found'>): check the address, or download before the job"
    assert len(lines) == 4 and set(lines) == {lines[0]}, job.output
    assert lines[0].startswith("cannot download (") and lines[0].endswith(message)
