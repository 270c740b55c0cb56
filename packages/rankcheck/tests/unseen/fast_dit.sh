# https://github.com/chuanyangjin/fast-DiT at 0ddbd642f4
# rankcheck --empty /CLONE/train.py --feature-path /DATA/dit --model DiT-S/8 --image-size 256 --num-classes 10 --epochs 3 --global-batch-size 16 --num-workers 1 --log-every 2 --ckpt-every 5
# DATA: dit/imagenet256_features and imagenet256_labels: 128 files each, 000.npy to 127.npy, of random float32 (1, 4, 32, 32) and int64 (1,) below 10
cd /CLONE
ed -s train.py <<'END'
156c
    vae = torch.nn.Identity()
.
33c

.
w
END
ed -s models.py <<'END'
368c
    return DiT(depth=1, hidden_size=32, patch_size=8, num_heads=2, **kwargs)
.
16c
class PatchEmbed(nn.Module):
    def __init__(self, size, patch, channels, dim, bias=True):
        super().__init__()
        self.patch_size, self.num_patches = (patch, patch), (size // patch) ** 2
        self.proj = nn.Conv2d(channels, dim, patch, patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


Attention = lambda dim, **options: nn.Linear(dim, dim)
Mlp = lambda in_features, **options: nn.Linear(in_features, in_features)
.
w
END
