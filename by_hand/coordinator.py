"""Forms the process groups of by_hand/regroup.py: python by_hand/coordinator.py HOST:29400

HOST is this machine's name in the job's network; only processes that reach it there can connect.
The next port, 29401, serves the store in which the ranks of a group find each other. Like
torchrun's rendezvous, the coordinator must not fail. It ends when the training has finished.
"""

import argparse
import asyncio
import contextlib
import socket
import struct
import sys

import torch.distributed as dist


class Coordinator:
    """Forms a group of all live processes once all have asked, and gives each its rank."""

    def __init__(self, patience):
        self.patience = patience  # seconds to wait for the others once a process has asked
        self.has_asked = {}  # by connection; a closed one means that its process is gone
        self.groups = 0
        self.finished = False
        self.ended = asyncio.Event()

    async def serve(self, reader, writer):
        self.has_asked[writer] = False
        with contextlib.suppress(ConnectionError):
            # Anything else comes from a stranger, such as a port scanner.
            while (message := await reader.read(1)) in (b"g", b"f"):
                self.finished = message == b"f"
                self.has_asked[writer] = message == b"g"
                asyncio.get_running_loop().call_later(self.patience, self.leave_out, self.groups)
                self.form_group()
        writer.close()
        del self.has_asked[writer]
        self.form_group()
        if self.finished and not self.has_asked:
            self.ended.set()

    def form_group(self):
        if self.has_asked and all(self.has_asked.values()):
            self.groups += 1
            for rank, writer in enumerate(self.has_asked):
                self.has_asked[writer] = False
                writer.write(struct.pack("!3i", self.groups, rank, len(self.has_asked)))
        elif any(self.has_asked.values()):
            for writer, has_asked in self.has_asked.items():
                if not has_asked:
                    writer.write(struct.pack("!3i", 0, 0, 0))  # asks it to regroup

    def leave_out(self, group):
        if group == self.groups:
            for writer, has_asked in self.has_asked.items():
                if not has_asked:
                    writer.transport.abort()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("patience", nargs="?", type=float, default=600, help="seconds to wait")
    args = parser.parse_args()
    args.host, _, port = args.address.rpartition(":")
    if not (args.host and port.isdigit()):
        parser.error(f"{args.address} is not an address such as node1:29400")
    if not 0 < args.patience < 1e6:
        parser.error("the patience must be more than 0 and less than 1e6 seconds")
    args.port = int(port)
    return args


async def main(args):
    coordinator = Coordinator(args.patience)
    try:
        listener = socket.create_server((args.host, args.port))
        store_listener = socket.create_server((args.host, args.port + 1))
    except (OSError, OverflowError) as error:
        sys.exit(f"cannot listen on {args.address} and the next port: in use, or not ours? {error}")
    if listener.getsockname()[0] == "127.0.1.1":  # Debian's and Ubuntu's entry in /etc/hosts
        sys.exit(f"only this machine can connect to {args.host}: name its address in the network")
    store = dist.TCPStore(  # noqa: F841  the store serves as long as this variable lives
        args.host,
        args.port + 1,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=store_listener.detach(),
    )
    await asyncio.start_server(coordinator.serve, sock=listener)
    await coordinator.ended.wait()


if __name__ == "__main__":
    asyncio.run(main(parse_args()))
