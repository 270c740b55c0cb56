# https://github.com/FoundationVision/LlamaGen at ce98ec4180
# rankcheck --empty --launcher torchrun --resume='--gpt-ckpt results/000-GPT-B/checkpoints/0000005.pt' /CLONE/autoregressive/train/train_c2i.py --code-path . --cloud-save-path cloud --gpt-model GPT-B --vocab-size 64 --image-size 256 --num-classes 10 --epochs 3 --global-batch-size 16 --num-workers 1 --log-every 2 --ckpt-every 5 --no-compile --ema
cd /CLONE
ed -s autoregressive/train/train_c2i.py <<'END'
21c
class CodeDataset(torch.utils.data.Dataset):
    flip, feature_dir, aug_feature_dir = False, "", None
    codes = torch.randint(64, (128, 1, 256), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.codes)

    def __getitem__(self, index):
        return self.codes[index], torch.tensor([index % 10])


build_dataset = lambda args: CodeDataset()
.
11c
import sys; sys.path.append("/CLONE"); from glob import glob
.
w
END
ed -s autoregressive/models/gpt.py <<'END'
461c
    return Transformer(ModelArgs(n_layer=1, n_head=2, dim=32, **kwargs)) # 111M
.
w
END
