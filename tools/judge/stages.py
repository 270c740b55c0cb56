"""What `make check` can judge: the checks of each script, how it starts, and what is right.

Without torch, so that a wrong argument is named at once.
"""

from typing import NamedTuple

EPOCHS = 3
CHUNKS = 12 * 16  # of the text for a GPT, to train on; its steps are no multiple of ten
GPT_OPTIONS = "--batch_size 8 --n_layer 4 --n_head 2 --n_embd 32 --context 8 --text text"
VAL_CHUNKS = 16
GPT_OPTIONS += f" --val_tokens {8 * VAL_CHUNKS} --eval_every_steps 10"
PYTHON = ("python",)
TORCHRUN = ("torchrun --standalone --nproc_per_node=2",)
RESTARTING = (f"{TORCHRUN[0]} --max-restarts=1",)
NODE = (
    "torchrun --nnodes={} --nproc_per_node=1 --rdzv_backend=c10d"
    " --rdzv_endpoint=localhost:{{port}} --rdzv_conf=last_call_timeout=1,keep_alive_interval=1,"
)
NODES = (NODE.format("2") + "is_host=1", NODE.format("2") + "is_host=0")
ELASTIC = (
    NODE.format("1:2 --max-restarts=3") + "is_host=1",
    "LAST_NODE=1 " + NODE.format("1:2 --max-restarts=3") + "is_host=0",
)


class Stage(NamedTuple):
    checks: str
    launchers: tuple = NODES
    options: str = "--batch_size 24"  # the last batch of an epoch is smaller
    processes: int = 2
    batch: int = 48  # of all processes together
    max_diff: float = 1e-4  # of the weights; rounding in float32 gives 1e-6
    own_weights: bool = False  # each rank begins with others: the script must broadcast rank 0's
    shards: bool = False  # each rank's optimizer has a part of each weight, flat or not
    same_samples: bool = False  # on all ranks, which share each layer, but for some biases
    max_gathered: float = 0.9  # of the weights, where a layer begins; embedding and head are large
    reference: str = ""  # the file whose weights on one process are right, if no plain loop's

    @property
    def saves_steps(self):
        """Whether it saves within an epoch."""
        return bool({"steps", "signal"} & {*self.checks.split()})


ONE = "starts names batch samples order weights loss save log snapshot seed resume previous"
SEVERAL = ONE.replace("starts", "starts processes").replace("seed", "seed dropout")
MULTINODE = Stage(f"{SEVERAL} gpus device restart disks")
BY_HAND = Stage(f"{SEVERAL} gpus device restart", TORCHRUN, own_weights=True)
SIGNALS = f"{SEVERAL} gpus device restart signal"
ELASTIC_DDP = Stage(f"{SIGNALS} disks node", ELASTIC, "--global_batch_size 89", batch=89)
FSDP = Stage(  # resume: see signal
    "starts processes names batch samples order weights loss log device signal sharded",
    options=GPT_OPTIONS,
    batch=16,
    max_diff=1e-9,  # in float64
    reference="gpt/pretrain.py",
)
WHOLE = FSDP.checks.replace(" sharded", "")
DDP = f"{WHOLE} save"
SPLIT = FSDP._replace(checks="starts processes names weights loss log device signal")
STAGES = {
    "singlegpu": Stage(f"{ONE} device", PYTHON, "--batch_size 48", 1),
    "multigpu": Stage(f"{SEVERAL} gpus device", PYTHON),
    "multigpu_torchrun": Stage(f"{SEVERAL} gpus device restart", TORCHRUN),
    "multinode": MULTINODE,
    "resumable": MULTINODE._replace(checks=f"{SEVERAL} gpus device restart steps disks"),
    "preemptible": MULTINODE._replace(checks=f"{SIGNALS} disks"),
    "elastic_ddp": ELASTIC_DDP,
    "recipes/gradient_accumulation": MULTINODE._replace(
        options="--batch_size 24 --micro_batch_size 8"
    ),
    "recipes/mixed_precision": MULTINODE._replace(max_diff=0.02),
    "recipes/profiler": MULTINODE,
    "recipes/tensorboard_logging": MULTINODE,
    "recipes/save_after_failure": ELASTIC_DDP._replace(checks=f"{SIGNALS} newest node"),
    "by_hand/ddp": BY_HAND,
    "by_hand/zero": BY_HAND._replace(checks=f"{BY_HAND.checks} state", shards=True),
    "by_hand/fsdp": BY_HAND._replace(
        checks=f"{BY_HAND.checks} sharded", shards=True, max_gathered=0.5
    ),
    "by_hand/tensor_parallel": BY_HAND._replace(
        checks=f"{BY_HAND.checks} sharded",
        options="--batch_size 48",
        shards=True,
        same_samples=True,
    ),
    "gpt/evaluate": FSDP._replace(checks=DDP, reference="gpt/evaluate.py"),
    "gpt/schedule": FSDP._replace(checks=DDP),
    "gpt/metrics": FSDP._replace(checks=DDP),
    "gpt/skip_steps": FSDP._replace(checks=DDP),
    "gpt/pretrain": FSDP._replace(checks=DDP),
    "gpt/dcp": FSDP._replace(checks=WHOLE),
    "gpt/fsdp": FSDP,
    "gpt/accumulate": FSDP._replace(options=f"{GPT_OPTIONS} --micro_batch_size 3"),
    "gpt/keep_snapshots": FSDP,
    "gpt/async_save": FSDP,
    "gpt/tensor_parallel": SPLIT._replace(options=f"{GPT_OPTIONS} --tp_size 2 --batch_size 16"),
    "gpt/pipeline_parallel": SPLIT._replace(
        options=f"{GPT_OPTIONS} --pp_size 2 --micro_batches 4 --batch_size 16"
    ),
    "gpt/context_parallel": SPLIT._replace(options=f"{GPT_OPTIONS} --cp_size 2 --batch_size 16"),
    "gpt/three_d": SPLIT._replace(
        launchers=tuple(node.replace("nproc_per_node=1", "nproc_per_node=2") for node in NODES),
        options=f"{GPT_OPTIONS} --pp_size 2 --tp_size 2 --micro_batches 4 --batch_size 16",
        processes=4,
    ),
    "gpt/moe": FSDP._replace(reference="gpt/moe.py"),
    "gpt/expert_parallel": SPLIT._replace(reference="gpt/moe.py"),
    "gpt/muon": FSDP._replace(reference="gpt/muon.py"),
}


# What must be right before anything else can be judged.
FIRST = {"starts", "processes", "names", "seed"}
NEEDED = {
    "weights": {"samples"},
    "loss": {"samples", "weights"},
    "device": {"samples", "weights", "gpus"},
    "snapshot": {"samples"},
    "previous": {"samples", "weights"},
    "disks": {"signal", "steps"},
    "newest": {"signal"},
}
