"""nanoGPT's training loop on one GPU, with the model and the arguments of gpt/pretrain.py

Written after train.py of https://github.com/karpathy/nanoGPT: bench/gpu.py compares the speed.
Its batches are random pieces of a text in memory, and there is no DDP. The model is not GPT-2's.
"""

import time

import torch
from torch import nn

from gpt import pretrain


def get_batch(text, args, device):
    """Returns random inputs and targets of shape (batch, context)."""
    starts = torch.randint(len(text) - args.context, (args.batch_size,)).tolist()
    inputs = torch.stack([text[i : i + args.context] for i in starts]).long()
    targets = torch.stack([text[i + 1 : i + 1 + args.context] for i in starts]).long()
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def compute_loss(model, inputs, targets):
    return pretrain.next_byte_loss(model(inputs), targets)


def update(model, loss, optimizer):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def train(args):
    """Prints the throughput and the MFU of each epoch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    text = bytearray(b"".join(path.read_bytes() for path in args.text))
    text = torch.frombuffer(text, dtype=torch.uint8)
    steps_per_epoch = (len(text) - args.val_tokens) // args.context // args.batch_size
    model = pretrain.GPT(args)
    model.to(device)
    model.init_weights(args.seed)
    optimizer = pretrain.configure_optimizer(model, args.learning_rate)
    loss_fn = torch.compile(compute_loss) if args.compile else compute_loss
    inputs, targets = get_batch(text, args, device)
    for _ in range(args.total_epochs):
        start_time = time.perf_counter()
        for _ in range(steps_per_epoch):
            with torch.autocast(device.type, torch.bfloat16, enabled=use_bfloat16):
                loss = loss_fn(model, inputs, targets)
            inputs, targets = get_batch(text, args, device)  # while the GPU computes the loss
            update(model, loss, optimizer)
        loss.item()  # waits for the GPU
        seconds = time.perf_counter() - start_time
        throughput = steps_per_epoch * args.batch_size * args.context / seconds
        mfu = throughput * model.flops_per_token / (args.peak_tflops * 1e12)
        print(f"loss {loss:.4g}, {throughput:,.0f} tokens/s, MFU {mfu:.1%}")


if __name__ == "__main__":
    train(pretrain.parse_args())
    print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
