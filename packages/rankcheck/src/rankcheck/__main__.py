"""python -m rankcheck, where the command is not on PATH."""

from rankcheck.cli import main

if __name__ == "__main__":
    main()
