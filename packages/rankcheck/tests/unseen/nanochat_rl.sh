# https://github.com/karpathy/nanochat at 92d63d4e8b
# rankcheck --empty -m scripts.chat_rl --device-batch-size 2 --examples-per-step 4 --num-samples 4 --max-new-tokens 6 --eval-every 5 --eval-examples 4 --save-every 5
cd /CLONE
ed -s scripts/chat_rl.py <<'END'
28c
from nanochat.gpt import GPT, GPTConfig


class Tokenizer:
    special = ["<|bos|>", "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>", "<|assistant_end|>"]

    def encode_special(self, name):
        return self.special.index(name)

    def get_bos_token_id(self):
        return 0

    def render_for_completion(self, conversation):
        return [0, *conversation]

    def decode(self, tokens):
        return str(tokens)


class GSM8K:
    def __init__(self, subset, split):
        pass

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return [10 + index % 7, 20 + index]

    def reward(self, conversation, text):
        return float(len(text) % 3)

    def evaluate(self, conversation, text):
        return len(text) % 2


def load_model(source, device, phase, model_tag, step):
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=32, vocab_size=128, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L"))
    model.to_empty(device=device)
    model.init_weights()
    return model, Tokenizer(), {}

.
26c
from nanochat.checkpoint_manager import save_checkpoint
.
w
END
ed -s nanochat/tokenizer.py <<'END'
32c

.
31c

.
w
END
ed -s nanochat/common.py <<'END'
74c
        nanochat_dir = os.path.abspath("nanochat")
.
73c
    if True:
.
w
END
ed -s nanochat/optim.py <<'END'
416c
        future = dist.all_gather_into_tensor(stacked_params, updated_params, async_op=True)
.
359c
                future = dist.all_gather_into_tensor(p, p_slice, async_op=True)
.
316c
        future = dist.reduce_scatter_tensor(grad_chunk, stacked_grads, op=dist.ReduceOp.AVG, async_op=True)
.
291c
                future = dist.reduce_scatter_tensor(grad_slice, grad, op=dist.ReduceOp.AVG, async_op=True)
.
284c
                future = dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)
.
w
END
