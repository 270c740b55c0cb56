"""A forked rank behaves as `python script` does."""

from rankcheck.launch.jobs import Shell

WORKERS_STAY = """
import sys
from torch.utils.data import DataLoader

options = {"persistent_workers": True, "multiprocessing_context": "fork"}
loader = DataLoader(range(8), num_workers=2, **options)
sys.batches = iter(loader)  # lives until the end
print(next(sys.batches).item())
"""


def test_data_workers_end_with_the_rank(tmp_path):
    (tmp_path / "script.py").write_text(WORKERS_STAY)
    shell = Shell(tmp_path)
    try:
        job = shell.ranks(f"{tmp_path}/script.py")
        status = job.wait()
    finally:
        shell.end_all()
    assert (status, job.output) == (0, "0\n")
