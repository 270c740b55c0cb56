# https://github.com/PolymathicAI/multiple_physics_pretraining at e751fc25ae
# rankcheck --empty /CLONE/train_basic.py --use_ddp --run_name demo --config basic_config --yaml_config /CLONE/config/tiny.yaml
# A restart finds exp/basic_config/demo/training_checkpoints/ckpt.tar by itself. Two random data sets in place of six; AdamW with a learning rate in place of D-Adaptation, whose package is lacking; the other packages are stand-ins of some lines. A step is five micro-batches, a save every epoch
cd /CLONE
mkdir -p data/swe data/diffre2d ruamel/yaml timm
touch data/swe/a.h5 data/diffre2d/a.h5
cat > h5py.py <<'END'
import numpy as np


class File:
    def __init__(self, path, mode):
        self.fields = 2 if "diffre2d" in path else 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def keys(self):
        return [f"{i:04d}" for i in range(20)]

    def __getitem__(self, sample):
        random = np.random.RandomState(100 * self.fields + int(sample))
        return {"data": random.rand(9, 32, 32, self.fields).astype("float32")}
END
cat > einops.py <<'END'
def rearrange(x, pattern, **sizes):
    """Of einops: letters and groups of letters only."""
    left, right = (side.replace("(", " ( ").replace(")", " ) ").split() for side in pattern.split("->"))
    groups, inside = [], None
    for word in left:
        if word == "(":
            inside = []
        elif word == ")":
            groups.append(inside)
            inside = None
        elif inside is None:
            groups.append([word])
        else:
            inside.append(word)
    shape = []
    for size, group in zip(x.shape, groups):
        known = 1
        for name in group:
            known *= sizes.get(name, 1)
        shape += [sizes.get(name, size // known if len(group) > 1 else size) for name in group]
    names = [name for group in groups for name in group]
    order = [word for word in right if word not in "()"]
    x = x.reshape(shape).permute([names.index(name) for name in order])
    final, inside, i = [], None, 0
    for word in right:
        if word == "(":
            inside = 1
        elif word == ")":
            final.append(inside)
            inside = None
        else:
            final, inside = (final + [x.shape[i]], None) if inside is None else (final, inside * x.shape[i])
            i += 1
    return x.reshape(final)
END
touch timm/__init__.py ruamel/__init__.py
cat > timm/layers.py <<'END'
import torch


class DropPath(torch.nn.Module):
    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)
END
cat > ruamel/yaml/__init__.py <<'END'
import yaml


class YAML:
    load = staticmethod(yaml.safe_load)
    dump = staticmethod(yaml.safe_dump)
END
echo 'CommentedMap = dict' > ruamel/yaml/comments.py
echo 'DAdaptAdam = DAdaptAdan = None' > dadaptation.py
echo 'Adan = None' > adan_pytorch.py
echo 'summary = print' > torchinfo.py
ed -s utils/logging_utils.py <<'END'
/git branch/d
/git hash/d
w
END
sed -e '/^finetune/,$d' -e '/PDEBench\/2D\/[NCs]/d' \
    -e "s#\['~/PDEBench/2D/diff.*#['/CLONE/data/swe', 'swe', ''], ['/CLONE/data/diffre2d', 'diffre2d', '']#" \
    -e '/^  processor_blocks/s/12/1/' -e '/^  num_heads/s/3/2/' -e '/^  embed_dim/s/192/16/' -e '/^  n_steps/s/16/4/' \
    -e '/^  weight_decay/s/1e-3/0.001/' -e '/^  learning_rate/s/-1 /0.001 /' -e '/^  warmup_steps/s/1000/10/' \
    -e "/^  optimizer/s/'adan'/'adam'/" -e '/^  epoch_size/s/2000/20/' -e '/^  max_epochs/s/500/6/' \
    -e '/^  batch_size/s/1/2/' -e '/^  exp_dir/s/~.MPP/exp/' -e '/^  num_data_workers/s/6/1/' \
    -e '/^  checkpoint_save_interval/s/10/2/' -e '/^  log_to_wandb/s/True/False/' \
    config/mpp_avit_ti_config.yaml > config/tiny.yaml
