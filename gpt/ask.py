"""Answer each line that is typed, with a model that has learned from chats: ask.py FOLDER"""

import argparse
import sys
from pathlib import Path

from transformers import pipeline


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of gpt/finetune_chat.py's --export_path")
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        parser.error(f"no model in {args.folder}: name a folder that has a config.json")
    return args


def main(args):
    model = pipeline("text-generation", str(args.folder))
    for question in sys.stdin:
        chat = [{"role": "user", "content": question.strip()}]
        (result,) = model(chat, max_new_tokens=20, do_sample=False)
        print(result["generated_text"][-1]["content"], flush=True)


if __name__ == "__main__":
    main(parse_args())
