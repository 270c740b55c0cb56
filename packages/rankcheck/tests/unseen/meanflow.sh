# https://github.com/revsic/py-meanflow at fa6f662a8f
# rankcheck --empty --resume='--resume out/checkpoint-last.pth' /CLONE/meanflow/train.py --dataset cifar10 --data_path . --batch_size 16 --epochs 4 --warmup_epochs 1 --eval_frequency 1 --num_workers 1 --log_per_step 2 --output_dir out --not_compile
cd /CLONE
ed -s meanflow/train.py <<'END'
26c
eval_model = lambda *args, **options: {}
.
w
END
ed -s meanflow/training/data_transform.py <<'END'
20c
            ToDtype(),
.
14c
            ToDtype(),
.
7c
from torchvision.transforms import Compose, RandomHorizontalFlip, ToTensor as ToDtype, Resize, Grayscale
ToImage = Compose
.
w
END
ed -s meanflow/models/model_configs.py <<'END'
23c
        "channel_mult": [1], "model_channels": 8, "num_blocks": 1,
.
w
END
