# https://github.com/facebookresearch/moco-v3 at c349e6e24f
# rankcheck --empty --resume='--resume checkpoint_0000.pth.tar' /CLONE/main_moco.py . -a resnet18 --dist-url tcp://127.0.0.1:23457 --multiprocessing-distributed --world-size 1 --rank 0 -b 16 --epochs 4 --warmup-epochs 1 -j 2 -p 2 --moco-dim 16 --moco-mlp-dim 32
cd /CLONE
ed -s main_moco.py <<'END'
37c

.
w
END
ed -s moco/loader.py <<'END'
10c
from PIL import ImageOps as tf
.
w
END
