import os
import sys

# Not in torchrun, nor in what multiprocessing starts to clean up.
if "WATCH_FOLDER" in os.environ and "resource_tracker" not in " ".join(sys.orig_argv):
    if "PRETEND_GPUS" in os.environ:
        import _pretend_on_cpu

        _pretend_on_cpu.install()
    import _watch_recorder

    _watch_recorder.install()
