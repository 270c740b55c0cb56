# https://github.com/karpathy/nanochat at 92d63d4e8b
# rankcheck --empty --resume='--resume-from-step 5' -m scripts.base_train --depth 2 --aspect-ratio 16 --head-dim 16 --max-seq-len 16 --window-pattern L --num-iterations 20 --device-batch-size 2 --total-batch-size 128 --eval-every 5 --eval-tokens 128 --core-metric-every -1 --sample-every -1 --save-every 5 --warmup-steps 2
cd /CLONE
ed -s scripts/base_train.py <<'END'
122c
token_bytes = torch.ones(256, dtype=torch.int32, device=device)
.
121c
tokenizer = Tokenizer()
.
20c
import argparse


class Tokenizer:
    def get_vocab_size(self):
        return 256

    def get_bos_token_id(self):
        return 0

    def encode(self, texts, prepend, num_threads):
        return [[prepend, *text.encode()] for text in texts]


.
w
END
ed -s nanochat/dataset.py <<'END'
60c
    return ["0", "1", "2"]
    parquet_files = sorted([
.
14c
pq = None
.
w
END
ed -s nanochat/dataloader.py <<'END'
20c
class pq:
    class ParquetFile:
        num_row_groups = 8

        def __init__(self, path):
            self.path = path

        def read_row_group(self, index):
            self.texts = [f"{self.path} {index} {i} " * (i % 3 + 1) for i in range(50)]
            return self

        def column(self, name):
            return self

        def to_pylist(self):
            return self.texts
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
ed -s nanochat/tokenizer.py <<'END'
32c

.
31c

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
