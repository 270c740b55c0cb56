import os
import sys


def main(path, size):
    """Prints the start of a file."""
    data = read(path)
    if not data:
        # Nothing to print.
        sys.exit()
    print(data[:size])


def read(path):
    total = open(path).read()
    return total


main("a", 3)
