"""Train a model of words, letter by letter, on one device: python ports/text_single.py 200"""

import argparse
import itertools
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

SYLLABLES = ["ba", "de", "fi", "go", "ku", "lat", "men", "nir", "pos", "rut", "sam", "ten"]
LETTERS = "_.abcdefghijklmnopqrstuvwxyz"  # "." starts and ends a word
PADDING = LETTERS.index("_")


def make_words(size, seed):
    """Returns words of 1 to 8 syllables, each a tensor of the numbers of its letters."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 8))) for _ in range(size)]
    return [torch.tensor([LETTERS.index(letter) for letter in f".{word}."]) for word in words]


def collate(words):
    """Pads words to one length; returns inputs and targets of shape (batch, length)."""
    padded = pad_sequence(words, batch_first=True, padding_value=PADDING)
    return padded[:, :-1], padded[:, 1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, len(LETTERS))

    def forward(self, inputs):
        hidden, _ = self.rnn(self.embedding(inputs))
        return self.head(hidden).transpose(1, 2)  # (batch, letters, length), for cross_entropy


def masked_loss(logits, targets, reduction="mean"):
    return F.cross_entropy(logits, targets, ignore_index=PADDING, reduction=reduction)


@torch.no_grad()
def evaluate(model, loader, device):
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, letters
    for inputs, targets in loader:
        totals[0] += masked_loss(model(inputs.to(device)), targets.to(device), "sum")
        totals[1] += (targets != PADDING).sum()
    return (totals[0] / totals[1]).item()


def train(model, train_loader, val_loader, device, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = itertools.chain.from_iterable(itertools.repeat(train_loader))  # endless
    for step in range(args.steps + 1):
        if step % args.eval_every == 0:
            print(f"step {step}: loss {evaluate(model, val_loader, device):.4f}")
        if step == args.steps:
            break
        inputs, targets = next(batches)
        loss = masked_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--eval_every", type=int, default=50, help="steps per evaluation")
    return parser.parse_args()


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    train_set = make_words(2048, 1)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(make_words(501, 2), args.batch_size, collate_fn=collate)
    train(Model().to(device), train_loader, val_loader, device, args)


if __name__ == "__main__":
    main(parse_args())
