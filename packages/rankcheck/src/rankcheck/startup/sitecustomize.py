"""Runs at the start of each Python process with this folder on PYTHONPATH; then comes one's own.

PRETEND_GPUS=2 pretends GPUs, WATCH_FOLDER records lines, and STARTUP_OBSERVER names an observer.
"""

import importlib.machinery
import importlib.util
import os
import sys


def run_own():
    """Runs the sitecustomize that Python would have found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def run_ours():
    if "resource_tracker" in " ".join(sys.orig_argv):  # multiprocessing starts it to clean up
        return
    observed = "AUDIT_STEPS" in os.environ  # by what has pretended GPUs of its own
    if (
        "PRETEND_GPUS" in os.environ
        and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        and not observed
    ):
        importlib.import_module("rankcheck.pretend_gpus.tensor")
    if "WATCH_FOLDER" in os.environ:
        if "PRETEND_GPUS" in os.environ:
            importlib.import_module("rankcheck.pretend_gpus.on_cpu").install()
        importlib.import_module("rankcheck.watch.recorder").install()
    if "STARTUP_OBSERVER" in os.environ:
        witness = importlib.import_module("rankcheck.witness")
        observer = witness.load_observer(os.environ["STARTUP_OBSERVER"])
        observer.install()
        getattr(observer, "note_end_of_command", int)()


run_ours()
run_own()
