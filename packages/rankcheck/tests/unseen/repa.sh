# https://github.com/sihyun-yu/REPA at 67f714503e
# rankcheck --empty --resume='--resume-step 5' /CLONE/train.py --exp-name demo --model SiT-S/2 --num-classes 1000 --encoder-depth 1 --batch-size 8 --epochs 3 --max-train-steps 20 --checkpointing-steps 5 --mixed-precision no --num-workers 1 --sampling-steps 100
cd /CLONE
ed -s train.py <<'END'
348c
                        num_steps=2,
.
176c
    vae = argparse.Namespace(decode=lambda z: argparse.Namespace(sample=z[:, :3]))
.
130c
        log_with=None,
.
65c
    return None
.
32c

.
31c

.
30c

.
28c
import wandb; wandb.Image = lambda image: None
.
26c
AutoencoderKL = None
.
25c
class CustomDataset(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.features = torch.randn(64, 8, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return torch.full((3, 256, 256), index / 64), self.features[index], index % 10


.
23c
class Encoder(torch.nn.Module):
    embed_dim = 8

    def forward_features(self, images):
        return images.mean((1, 2, 3)).view(-1, 1, 1).expand(-1, 256, 8)


load_encoders = lambda *args: ([Encoder()], ["other"], [None])
.
w
END
ed -s models/sit.py <<'END'
377c
    return SiT(depth=1, hidden_size=32, decoder_hidden_size=32, patch_size=2, num_heads=2, **kwargs)
.
13c
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
