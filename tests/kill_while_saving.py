"""Kills a process that saves and saves, N times: kill_while_saving.py N

Forks instead of starting anew, since importing torch takes far longer than saving.
"""

import argparse
import os
import random
import signal
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import singlegpu


def main(kills):
    args = argparse.Namespace(snapshot_path="snapshot.pt")
    model = torch.nn.Linear(500, 500)  # 1 MB: long enough to write that a kill hits the middle
    optimizer = torch.optim.SGD(model.parameters())
    trainer = singlegpu.Trainer(model, None, None, optimizer, torch.device("cpu"), args)
    trainer._log = lambda message: None
    trainer.loss = 0.0
    trainer._save_snapshot()
    loads, interrupted_writes = 0, 0
    random.seed(0)
    for _ in range(kills):
        read_fd, write_fd = os.pipe()
        child = os.fork()
        if child == 0:
            while True:
                trainer.epochs_run += 1
                trainer._save_snapshot()
                os.write(write_fd, b".")
        os.read(read_fd, 1)
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read_fd)
        os.close(write_fd)
        interrupted_writes += os.path.exists("snapshot.pt.tmp")
        before = trainer.epochs_run
        trainer._load_snapshot("snapshot.pt")  # ends the process with a message where it cannot
        loads += trainer.epochs_run > before
    print(f"{kills} kills, {loads} snapshots that load, {interrupted_writes} interrupted writes")
    assert interrupted_writes > kills / 10, "the kills missed what they were to hit"


if __name__ == "__main__":
    main(int(sys.argv[1]))
