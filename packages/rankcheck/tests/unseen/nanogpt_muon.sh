# https://github.com/kv-wang/nanoGPT_muon- at b39496ce70
# rankcheck --empty /CLONE/train_gptm.py
# DATA: fineweb/fineweb_train_000001.bin, fineweb_train_000002.bin and fineweb_val_000000.bin: 20000, 20000 and 4000 random uint16 below 200, in the layout that the script reads
cd /CLONE
ed -s train_gptm.py <<'END'
492c
warmup_steps = 2
.
475c
    return torch.tensor(window_size // 128, dtype=torch.int32).cuda(non_blocking=True)
.
430c
model: nn.Module = GPT(vocab_size=args.vocab_size, num_layers=16, num_heads=1, model_dim=128,
.
422c
    return ""
.
409c
        print0("")
.
384c

.
377c
    save_checkpoint = True
.
376c
    val_loss_every = 5
.
374c
    vocab_size = 256
.
371c
    num_iterations = 20
.
369c
    val_seq_len = 512
.
368c
    train_seq_len = 128
.
367c
    val_tokens = 1024
.
366c
    val_files = "fineweb/fineweb_val_*.bin"
.
365c
    train_files = "fineweb/fineweb_train_*.bin"
.
345c
    files = sorted(Path("/DATA").glob(filename_pattern))
.
338c
        tokens = torch.empty(num_tokens, dtype=torch.uint16)
.
189c
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=self.attn_scale).transpose(1, 2)
.
70c
    acc_m_u32 = (acc_bf16_view_u16.to(torch.int32) << 16) | mantissa.to(torch.int32)
.
21c

.
w
END
