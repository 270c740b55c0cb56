"""Of two runs, one writes after the other, and both have written before one renames."""

import os

os.chmod(".", 0o500)
os.getuid() or os.setuid(65534)
