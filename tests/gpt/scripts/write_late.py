"""The data of the first snapshot is written half a second after it is time for the next one."""

import threading
import time

from patched import after, before, script
from torch.distributed.checkpoint import FileSystemWriter

steps, to_write = [], []


@before(FileSystemWriter, "write_data")
def write_late(self, plan, planner):
    to_write.append(self.path.name)
    while len(steps) < 8 and threading.current_thread() is not threading.main_thread():
        time.sleep(0.01)
    time.sleep(0.5)
    print("writing", to_write.pop())


@before(script.dcp, "async_save")
def assert_written(*arguments, **options):
    assert not to_write


@after(script.Trainer, "_run_batch")
def count(self, inputs, targets):
    steps.append(self.samples_run)
    print("trained", len(steps), "steps")
