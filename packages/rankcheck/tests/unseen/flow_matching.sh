# https://github.com/facebookresearch/flow_matching at 11568d37f8
# rankcheck --empty --resume='--resume out/checkpoint.pth' /CLONE/examples/image/train.py --dataset cifar10 --data_path . --batch_size 8 --epochs 3 --eval_frequency 1 --num_workers 1 --output_dir out --use_ema
# DATA: none; torchdiffeq 0.2.5 is installed
cd /CLONE
ed -s examples/image/train.py <<'END'
25c
eval_model = lambda *args, **options: {}
.
20c
sys.path.append("/CLONE"); from models.model_configs import instantiate_model
.
w
END
ed -s examples/image/training/data_transform.py <<'END'
14c
        ToDtype(),
.
13c
        lambda image: image.resize((8, 8)),
.
7c
from torchvision.transforms import Compose, RandomHorizontalFlip, ToTensor as ToDtype; ToImage = Compose
.
w
END
ed -s examples/image/models/model_configs.py <<'END'
54c
        "channel_mult": [1],
.
51c
        "num_res_blocks": 1,
.
49c
        "model_channels": 32,
.
w
END
ed -s examples/image/training/train_loop.py <<'END'
100c
            with torch.cuda.amp.autocast(enabled=False):
.
w
END
