# https://github.com/facebookresearch/swav at 06b1b7cbaf
# rankcheck --empty /CLONE/main_swav.py --data_path . --size_crops 32 --batch_size 8 --epochs 4 --warmup_epochs 1 --base_lr 0.1 --workers 1 --use_fp16 false --hidden_mlp 32 --feat_dim 16 --nmb_prototypes 8 --freeze_prototypes_niters 2 --queue_length 32 --epoch_queue_starts 1
cd /CLONE
ed -s main_swav.py <<'END'
23c
apex, LARC = SimpleNamespace(amp=None), lambda optimizer, **options: vars(optimizer).update(optim=optimizer) or optimizer
.
22c
from types import SimpleNamespace
.
w
END
ed -s src/multicropdataset.py <<'END'
57c

.
56c
        image = Image.fromarray(self.images[index])
.
10c
from PIL import Image, ImageFilter
.
w
END
ed -s src/logger.py <<'END'
12c
from unittest.mock import MagicMock; pd = MagicMock()
.
w
END
ed -s src/resnet50.py <<'END'
341c
    return ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=8, **kwargs)
.
w
END
