"""Lets frameworks take CPUs where a script asks for GPUs: they are told that there are none.

Accelerate does so by ACCELERATE_USE_CPU; each function here changes a module of one of the others
when it has been imported.
"""

import functools
import importlib.abc
import inspect
import os
import sys
from pathlib import Path

import torch

from rankcheck import replay, witness
from rankcheck.launch.scripts import sources
from rankcheck.pretend_gpus.on_cpu import change
from rankcheck.witness import details, files


class CannotRunHere(SystemExit):
    """Ends a script that cannot be run on CPU processes, and says what to do."""

    def __init__(self, text):
        witness.write(cannot_run=text)
        super().__init__(text)


def refusal(text):
    def refuse(*args, **options):
        raise CannotRunHere(text)

    return refuse


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls the function that CHANGES has for a module after its import."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec:
            execute = spec.loader.exec_module

            def execute_and_change(module):
                execute(module)
                CHANGES[name](module)

            spec.loader.exec_module = execute_and_change
        return spec


def note_framework():
    """Notes that a framework joins the process group, and leaves it, or not: not the script."""
    witness.write(framework=True)


def note_fsdp(asked):
    """Notes that FSDP is asked for, which frameworks have for GPUs only: DDP takes its place."""
    if asked:
        witness.write(ddp_for_fsdp=True)


def use_bfloat16(precision):
    """Accelerate refuses float16 on CPUs; Lightning takes bfloat16 by itself."""
    return "bf16" if str(precision) == "fp16" else precision


def change_accelerator(module):
    """Accelerate itself takes DDP in place of FSDP."""

    def note_plugin(plugin):
        note_fsdp(plugin or os.environ.get("ACCELERATE_USE_FSDP") == "true")
        return plugin

    changes = {"mixed_precision": use_bfloat16, "fsdp_plugin": note_plugin}
    change(module.Accelerator, "__init__", **changes)


def change_accelerate_loaders(module):
    """Accelerate's loaders read a batch ahead, to know which one is the last."""
    loaders = module.GradientState()
    replay.is_ahead = lambda: loaders.in_dataloader and not loaders.end_of_dataloader


def change_notebook_launchers(module):
    text = "notebook_launcher starts its ranks itself: call the function in its place"
    module.notebook_launcher = module.debug_launcher = refusal(text)


def change_training_arguments(module):
    check = module.TrainingArguments.__post_init__

    def use_cpu(self):
        note_framework()
        if self.deepspeed:
            raise CannotRunHere("DeepSpeed needs GPUs: check the script with deepspeed=None")
        note_fsdp(self.fsdp)
        self.use_cpu = True
        self.bf16, self.fp16 = self.bf16 or self.fp16, False
        self.bf16_full_eval, self.fp16_full_eval = self.bf16_full_eval or self.fp16_full_eval, False
        self.tf32 = None
        check(self)

    module.TrainingArguments.__post_init__ = use_cpu


def count_of(devices):
    """Returns how many GPUs the argument `devices` of Lightning names; of all, 0."""
    if isinstance(devices, str) and "," in devices:
        devices = [number for number in devices.split(",") if number.strip()]
    if isinstance(devices, list | tuple):
        return len(devices)
    return 0 if str(devices) in ("auto", "-1") else int(devices)


def change_connector(owner):
    """Lightning's Trainer and Fabric get a CPU process for each rank that was started."""
    call = owner.__init__
    signature = inspect.signature(call)

    @functools.wraps(call)
    def wrapper(*args, **options):
        note_framework()
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        asked = bound.arguments
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["PRETEND_GPUS"]) or 1
        nodes = int(os.environ.get("GROUP_WORLD_SIZE") or 1)
        is_alone = count_of(asked["devices"]) == asked["num_nodes"] == 1
        if is_alone and local_size * nodes > 1:
            raise CannotRunHere("Lightning's devices=1 trains on one GPU alone: pass --ranks 1")
        strategy = asked["strategy"]
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        if "deepspeed" in name.lower():
            raise CannotRunHere("DeepSpeed needs GPUs: check the script with strategy='ddp'")
        note_fsdp("fsdp" in name.lower())
        if "fsdp" in name.lower() or (name == "auto" and not is_alone):
            asked["strategy"] = "ddp"  # also where one process is to train as all did
        accelerator = str(asked["accelerator"])
        if accelerator in ("auto", "cpu", "cuda", "gpu") or "CUDA" in accelerator:
            asked |= {"accelerator": "cpu", "devices": local_size, "num_nodes": nodes}
        call(*bound.args, **bound.kwargs)

    owner.__init__ = wrapper


def change_launcher(module):
    """Its ranks would be new processes, which the witness does not see."""
    text = "Lightning starts its ranks itself here: pass --launcher torchrun"
    module._SubprocessScriptLauncher._call_children_scripts = refusal(text)


def change_closures(module):
    """An optimizer that calls its closure first, and once, is called after it: it is followed."""
    original = module.Precision.optimizer_step

    def optimizer_step(self, optimizer, model, closure, **options):
        if isinstance(optimizer, torch.optim.LBFGS):
            return original(self, optimizer, model, closure, **options)
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**options)
        return result

    module.Precision.optimizer_step = optimizer_step


def change_saving(module):
    """Notes a checkpoint, which torch.save only gets as a buffer, and which gets its name last."""

    def note(checkpoint, filepath):
        path = witness.path_of(filepath)
        witness.write(saved=path, inode=None, by_library=True, place=witness.place())

    witness.observe("saves", module, "_atomic_save", before=note)


def change_deepspeed(module):
    module.initialize = refusal("DeepSpeed needs GPUs: check the script with DDP in its place")


CHANGES = {
    "accelerate.accelerator": change_accelerator,
    "accelerate.data_loader": change_accelerate_loaders,
    "accelerate.launchers": change_notebook_launchers,
    "deepspeed": change_deepspeed,
    "tensorboardX.writer": details.follow_runs,
    "torch.utils.tensorboard.writer": details.follow_runs,
    "torchvision.datasets": files.follow_downloads,
    "transformers.training_args": change_training_arguments,
    "wandb": details.follow_runs,
}
for pytorch in ("lightning.pytorch", "pytorch_lightning"):
    launcher = f"{pytorch}.strategies.launchers.subprocess_script"
    connector = f"{pytorch}.trainer.connectors.accelerator_connector"
    CHANGES[launcher] = change_launcher
    CHANGES[connector] = lambda module: change_connector(module._AcceleratorConnector)
    CHANGES[f"{pytorch}.plugins.precision.precision"] = change_closures
for fabric in ("lightning.fabric", "lightning_fabric"):
    CHANGES[f"{fabric}.strategies.launchers.subprocess_script"] = change_launcher
    CHANGES[f"{fabric}.connector"] = lambda module: change_connector(module._Connector)
    CHANGES[f"{fabric}.utilities.cloud_io"] = change_saving


def install():
    sys.meta_path.insert(0, AfterImport())
    if ".launch(" not in sources(Path(os.environ["WITNESS_SCRIPT"])):
        os.environ["LT_CLI_USED"] = "1"  # Fabric then takes it as started by `fabric run`
