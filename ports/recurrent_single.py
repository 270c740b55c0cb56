"""Train an LSTM language model on one device: python ports/recurrent_single.py 10"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB_SIZE = 20
HIDDEN_SIZE = 64
CHUNK = 35  # tokens through which gradients flow back


class LanguageModel(nn.Module):
    """Maps tokens of shape (time, columns) and a state to scores of the next ones and a state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.lstm = nn.LSTM(HIDDEN_SIZE, HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)

    def forward(self, tokens, state):
        outputs, state = self.lstm(self.embedding(tokens), state)
        return self.head(outputs), state


def make_columns(size, columns, seed):
    """Returns a text as columns that are read side by side: inputs and targets, (time, columns)."""
    rules = torch.randint(VOCAB_SIZE, (VOCAB_SIZE,) * 2, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (size,), generator=generator)
    for index in torch.nonzero(torch.rand(size, generator=generator) < 0.9).flatten()[2:]:
        tokens[index] = rules[tokens[index - 2], tokens[index - 1]]  # the others are random
    tokens = tokens[: size // columns * columns].view(columns, -1).t()
    return tokens[:-1], tokens[1:]


def initial_state(tokens):
    return tuple(torch.zeros(2, 1, tokens.shape[1], HIDDEN_SIZE, device=tokens.device))


@torch.no_grad()
def evaluate(model, inputs, targets):
    model.eval()
    scores, _ = model(inputs, initial_state(inputs))
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten()).item()


def train(model, train_columns, val_columns, args):
    inputs, targets = train_columns
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    best_loss = float("inf")
    for epoch in range(args.epochs):
        model.train()
        state = initial_state(inputs)
        for start in range(0, len(inputs), CHUNK):
            scores, state = model(inputs[start : start + CHUNK], state)
            state = tuple(part.detach() for part in state)  # no gradient into earlier chunks
            loss = F.cross_entropy(scores.flatten(0, 1), targets[start : start + CHUNK].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        val_loss = evaluate(model, *val_columns)
        scheduler.step(val_loss)
        print(f"epoch {epoch + 1}: val loss {val_loss:.4f}")
        if val_loss < best_loss:
            best_loss = val_loss
            torch.save(model.state_dict(), "best.pt")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=10)
    parser.add_argument("--columns", type=int, default=20, help="text parts read in parallel")
    return parser.parse_args()


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    train_columns = [part.to(device) for part in make_columns(20_000, args.columns, seed=1)]
    val_columns = [part.to(device) for part in make_columns(5_000, args.columns, seed=2)]
    train(LanguageModel().to(device), train_columns, val_columns, args)


if __name__ == "__main__":
    main(parse_args())
