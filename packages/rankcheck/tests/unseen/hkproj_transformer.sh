# https://github.com/hkproj/pytorch-transformer-distributed at f73abd3f44
# rankcheck --empty /CLONE/train.py --batch_size 4 --num_epochs 4 --seq_len 12 --d_model 32
cd /CLONE
ed -s train.py <<'END'
144c
    ds_raw = [{"translation": {"en": f"{i % 7} {i % 5} {i}", "it": " ".join(map(str, range(i % 6)))}} for i in range(60)]
.
24c
torchmetrics, wandb.define_metric, wandb.run.id = MagicMock(), MagicMock(), "1"
.
17c
from unittest.mock import MagicMock
.
w
END
