# https://github.com/tyler-romero/microR1 at 45fe0a82eb
# rankcheck --empty /CLONE/train.py --total_rollouts=10 --save_interval=3 --episodes_per_rollout=32 --device_rollout_batch_size=16 --group_size=4 --policy_update_batch_size=8 --max_new_tokens=8 --warmup_iters=4 --lr_decay_iters=40
# Launched with torchrun. Its users start it in its own folder; here configurator.py is opened beside the script instead of in the current folder. Qwen and its tokenizer are tiny_transformers.py, written here: the same "pretrained" weights on every rank, a vocabulary of 64 words in which a response earns a reward now and then. It never reads its checkpoint out/ckpt.pt
cd /CLONE
cat > tiny_transformers.py <<'PY'
"""Stands in for Qwen2.5 and its tokenizer: 64 words, a causal model of a few lines."""
from collections import namedtuple

import torch
from torch import nn

VOCABULARY = ["<pad>", "<eos>", "<think>", "...", "</think>", "<answer>", "</answer>"]
VOCABULARY += [f"<think> so </think> <answer> {k} </answer>" for k in range(1, 21)]
VOCABULARY += [f"w{i}" for i in range(64 - len(VOCABULARY))]


Output = namedtuple("Output", "logits")


class Inputs(dict):
    def to(self, device):
        return Inputs({name: tensor.to(device) for name, tensor in self.items()})


class AutoTokenizer:
    pad_token_id, eos_token_id = 0, 1

    @classmethod
    def from_pretrained(cls, path, padding_side):
        return cls()

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return " ".join(message["content"] for message in messages)

    def encode(self, word):
        return VOCABULARY.index(word) if word in VOCABULARY else 27 + sum(word.encode()) % 37

    def __call__(self, prompts, return_tensors, padding):
        rows = [[self.encode(word) for word in prompt.split()] for prompt in prompts]
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        return Inputs(input_ids=ids, attention_mask=(ids != 0).long())

    def batch_decode(self, ids, skip_special_tokens):
        return [" ".join(VOCABULARY[i] for i in row if i > 1) for row in ids.tolist()]


class AutoModelForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 64, bias=False)

    @classmethod
    def from_pretrained(cls, path, torch_dtype, **options):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls().to(torch_dtype)

    @property
    def device(self):
        return self.head.weight.device

    def gradient_checkpointing_enable(self):
        pass

    gradient_checkpointing_disable = gradient_checkpointing_enable

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        h = self.embed(input_ids) * mask
        past = h.cumsum(1) / mask.cumsum(1).clamp(min=1)
        return Output(logits=self.head(torch.tanh(self.mix(torch.cat([h, past], -1)))))

    def generate(self, ids, attention_mask, num_return_sequences, max_new_tokens, use_cache, do_sample, temperature):
        ids = ids.repeat_interleave(num_return_sequences, 0)
        mask = attention_mask.repeat_interleave(num_return_sequences, 0)
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            logits = self(ids, mask).logits[:, -1].float()
            new = torch.multinomial(torch.softmax(logits / temperature, -1), 1).squeeze(1)
            new = torch.where(ended, 0, new)
            ended |= new == 1
            ids = torch.cat([ids, new.unsqueeze(1)], 1)
            mask = torch.cat([mask, torch.ones_like(new).unsqueeze(1)], 1)
            if ended.all():
                break
        return ids
PY
ed -s train.py <<'ED'
94s/'configurator.py'/os.path.join(os.path.dirname(__file__), 'configurator.py')/
34s/transformers/tiny_transformers/
w
ED
