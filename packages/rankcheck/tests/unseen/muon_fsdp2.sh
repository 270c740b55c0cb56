# https://github.com/hanlinxuy/my_muon_fsdp2 at 72fa6fc3a1
# rankcheck --empty --launcher torchrun /CLONE/examples/train_gpt.py --fsdp --no-mixed-precision --epochs 3 --batch-size 4 --seq-length 16 --num-workers 1
cd /CLONE
ed -s examples/train_gpt.py <<'END'
557c
        max_grad_norm=0.0,
.
532c
    num_samples = 48
.
71c
    n_head = 2
.
70c
    n_layer = 1
.
69c
    n_embd = 32
.
67c
    vocab_size = 128
.
24c
import argparse, sys; sys.path.append("/CLONE/src")
.
w
END
