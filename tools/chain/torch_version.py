"""Writes another version of torch where its number is only repeated: make torch VERSION=2.14.0

What says something about a version, such as a fault of it, is listed: there, a person looks whether
it still holds. Then: make .venv/dev, and the tests.
"""

import re
import subprocess
import sys

from tools.steps import ROOT

REPEATED = r"(?<=torch==){0}\b|(?<=torch ){0}(?=\+cpu|\. In nine scripts)"
LEFT_OUT = ("CHANGELOG.md", ".svg", ".json")  # what was, stays


def main():
    version = sys.argv[1] if len(sys.argv) > 1 else ""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit("torch: name the version, as in: make torch VERSION=2.14.0")
    (old,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    minor = re.compile(rf"(?<![\d.]){re.escape(old.rpartition('.')[0])}(?![\d])")
    count, left = 0, []
    for name in files.split():
        path = ROOT / name
        if name.endswith(LEFT_OUT) or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:  # an image
            continue
        new, times = re.subn(REPEATED.format(re.escape(old)), version, text)
        count += times
        if times:
            path.write_text(new)
        lines = enumerate(new.splitlines(), 1)
        left += [f"{name}:{n}: {line.strip()}" for n, line in lines if minor.search(line)]
    print(f"{count} places say {version} now; look at these, which say something of {old}:")
    print(*left, sep="\n")


if __name__ == "__main__":
    main()
