# https://github.com/FutureXiang/Diffusion at 4eefaf647b
# rankcheck --empty --resume "--config /CLONE/config/resume.yaml" /CLONE/cifar.py --config /CLONE/config/tiny.yaml --use_amp
# Needs the folder's stand-in of ema_pytorch on PYTHONPATH. To resume, its user edits load_epoch in the configuration: resume.yaml is tiny.yaml with load_epoch 0 (the first save; saves at epochs 0, 2, 4 and 5; killed before model_0.pth is there, its user would start without it). --local_rank, which no launcher passes any more, is read from LOCAL_RANK
cd /CLONE
ed -s cifar.py <<'EOF'
151c
    parser.add_argument('--local_rank', default=int(os.environ['LOCAL_RANK']), type=int,
.
113s/100/2/
53s/transform=tf/transform=tf, image_size=(3, 8, 8)/
w
q
EOF
ed -s model/DDPM.py <<'EOF'
/def ddim_sample/s/steps=100/steps=2/
w
q
EOF
ed -s model/models.py <<'EOF'
g/UViT/s/, UViT//
g/import UViT/d
g/uvit/d
w
q
EOF
ed -s model/block.py <<'EOF'
/GroupNorm(32/s/32/8/
w
q
EOF
cat > config/tiny.yaml <<'EOF'
model_type: 'DDPM'
net_type: 'UNet'
diffusion:
  n_T: 1000
  betas: [1.0e-4, 0.02]
network:
  image_shape: [3, 8, 8]
  n_channels: 8
  ch_mults: [1, 2]
  is_attn: [False, False]
  dropout: 0.1
  n_blocks: 1
  use_res_for_updown: False
n_epoch: 6
batch_size: 16
lrate: 1.0e-4
warm_epoch: 3
load_epoch: -1
flip: True
ema: 0.9999
n_sample: 4
save_dir: './2000_unconditional'
save_model: True
EOF
sed 's/load_epoch: -1/load_epoch: 0/' config/tiny.yaml > config/resume.yaml
