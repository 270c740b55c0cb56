import os
import sys

# Not in torchrun, nor in what multiprocessing starts to clean up.
if "WATCH_FOLDER" in os.environ and "resource_tracker" not in " ".join(sys.orig_argv):
    import _watch_recorder

    _watch_recorder.install()
