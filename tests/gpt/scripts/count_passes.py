"""Counts the passes of each layer that keep a gradient."""

from patched import after, before, script
from transformers.models.llama.modeling_llama import LlamaAttention

counts = [0, 0]


@before(LlamaAttention, "forward")
def count(self, hidden_states, **inputs):
    counts[self.layer_idx] += hidden_states.requires_grad


@after(script.Trainer, "train")
def print_counts(self):
    print("passes with a gradient:", [count / self.steps for count in counts])
