"""Forms the process groups of recipes/regroup.py: python recipes/coordinator.py HOST:29400

HOST is this machine's name in the network of the job: only who reaches it there can connect. The
next port, 29401, is that of the store, where the ranks of a group find each other. Like torchrun's
rendezvous, it must not fail. It ends when the training has finished.
"""

import asyncio
import socket
import struct
import sys

import torch.distributed as dist


class Coordinator:
    """Gives all processes that live a group, once all have asked, and their ranks in it."""

    def __init__(self, patience):
        self.patience = patience  # in seconds, for members of a broken group that have not asked
        self.processes = []  # their connections: one that is closed is a process that is gone
        self.waiting = []  # those that have asked for a group
        self.members = []  # those of the last group
        self.groups = 0
        self.finished = False  # nobody can join any more
        self.ended = asyncio.Event()

    async def serve(self, reader, process):
        self.processes.append(process)
        try:
            while message := await reader.read(1):
                self.finished = message == b"f"
                if not self.finished:
                    self.ask(process)
        except ConnectionError:
            pass
        self.processes.remove(process)
        self.waiting = [other for other in self.waiting if other is not process]
        self.form_group()
        if self.finished and not self.processes:
            self.ended.set()

    def ask(self, process):
        self.waiting.append(process)
        if process in self.members:  # its group is broken; newcomers wait for as long as it takes
            loop = asyncio.get_running_loop()
            loop.call_later(self.patience, self.leave_out, self.groups)
        self.form_group()

    def form_group(self):
        missing = [process for process in self.processes if process not in self.waiting]
        if self.waiting and missing:
            for process in missing:
                process.write(struct.pack("!3i", 0, 0, 0))  # asks it to come
        elif self.waiting:
            self.groups += 1
            self.members = self.waiting
            self.waiting = []
            for rank, process in enumerate(self.members):
                process.write(struct.pack("!3i", self.groups, rank, len(self.members)))

    def leave_out(self, groups):
        late = [process for process in self.processes if process not in self.waiting]
        for process in late if groups == self.groups else []:
            process.transport.abort()


async def main(address, patience="600"):
    host, port = address.rsplit(":", 1)
    coordinator = Coordinator(float(patience))
    await asyncio.start_server(coordinator.serve, sock=socket.create_server((host, int(port))))
    listener = socket.create_server((host, int(port) + 1))
    store = dist.TCPStore(  # noqa: F841  it serves as long as this variable lives
        host,
        int(port) + 1,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    await coordinator.ended.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
