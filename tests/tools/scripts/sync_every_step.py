"""With local_sgd.py, the nodes average their weights after each step, as the others do."""

from patched import script

parse_args = script.parse_args


def parse_and_sync():
    args = parse_args()
    if hasattr(args, "sync_every"):
        args.sync_every = 1
        args.outer_lr = 1.0
        args.outer_momentum = 0.0
    return args


script.parse_args = parse_and_sync
