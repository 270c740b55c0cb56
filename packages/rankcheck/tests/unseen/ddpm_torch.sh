# https://github.com/tqch/ddpm-torch at b60eb8deee
# rankcheck --empty --launcher torchrun /CLONE/train.py --distributed --config-path /CLONE/configs/cifar10.json --root . --num-workers 1 --num-samples 4 --image-intv 2 --chkpt-intv 1 --chkpt-name cifar10.pt
cd /CLONE
ed -s configs/cifar10.json <<'END'
25c
    "warmup": 10,
.
24c
    "epochs": 4,
.
22c
    "batch_size": 16,
.
17c
    "apply_attn": [false],
.
16c
    "num_res_blocks": 1,
.
15c
    "ch_multipliers": [1],
.
14c
    "hid_channels": 32,
.
4c
    "timesteps": 10,
.
w
END
ed -s ddpm_torch/__init__.py <<'END'
3c
Evaluator = None
.
w
END
ed -s ddpm_torch/utils/__init__.py <<'END'
7c

.
2c
plt = None
.
1c

.
w
END
ed -s ddpm_torch/datasets.py <<'END'
169c
        transforms.Normalize()
.
85c
        transforms.Normalize()
.
54c
        transforms.Normalize()
.
52c
        lambda image: image.resize((8, 8)),
.
35c
        transforms.Normalize()
.
10c
from torchvision import transforms, datasets as tvds; tvds.VisionDataset = tvds.ImageFolder
.
w
END
