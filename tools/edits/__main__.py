import sys

from tools.edits import read

numbers = [str(number) for number in range(1, 11)]
if sys.argv[1:2] not in [[number] for number in numbers]:
    sys.exit("name one of the scripts 1 to 10: python -m tools.edits 3 > broken.py")
print(read("faults")[int(sys.argv[1]) - 1].source(), end="")
