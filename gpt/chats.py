"""Write chats, and 50 questions with their solutions that no chat contains: chats.py FOLDER

Writes FOLDER/chats.jsonl, for gpt/finetune_chat.py, and questions.txt and solutions.txt, a line for
each question. The chats are sums, and words of Python's standard library in capital letters.
"""

import argparse
import json
import os
import random
import re
from pathlib import Path


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to write")
    args = parser.parse_args()
    if not os.path.isdir(args.folder) or not os.access(args.folder, os.W_OK):
        parser.error(f"cannot write into {args.folder}: create this folder, or name another one")
    return args


def make_chats():
    """Returns pairs of a question and its answer, in random order."""
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in library)
    words = sorted(set(re.findall(r"\b[a-z]{3,8}\b", text)))
    chats = [(f"Write {word} in capitals.", word.upper()) for word in words]
    chats += [(f"What is {a} + {b}?", str(a + b)) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(chats)
    return chats


def main(args):
    folder = Path(args.folder)
    chats = make_chats()
    with open(folder / "chats.jsonl", "w") as file:
        for question, answer in chats[50:]:
            user = {"role": "user", "content": question}
            assistant = {"role": "assistant", "content": answer}
            print(json.dumps({"messages": [user, assistant]}), file=file)
    questions, solutions = zip(*chats[:50], strict=True)
    (folder / "questions.txt").write_text("\n".join(questions) + "\n")
    (folder / "solutions.txt").write_text("\n".join(solutions) + "\n")


if __name__ == "__main__":
    main(parse_args())
