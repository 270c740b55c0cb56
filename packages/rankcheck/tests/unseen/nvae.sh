# https://github.com/NVlabs/NVAE at 9fc1a288fb
# rankcheck --empty --resume=--cont_training /CLONE/train.py --root . --save x --data data --dataset cifar10 --num_channels_enc 4 --num_channels_dec 4 --epochs 4 --warmup_epochs 1 --num_postprocess_cells 1 --num_preprocess_cells 1 --num_latent_scales 1 --num_latent_per_group 2 --num_cell_per_cond_enc 1 --num_cell_per_cond_dec 1 --num_preprocess_blocks 0 --num_postprocess_blocks 0 --num_groups_per_scale 2 --batch_size 12 --weight_decay_norm 1e-2 --num_nf 0 --num_process_per_node 2 --res_dist --fast_adamax
# --resume with =, as its argument begins with --. README: a stopped run is started again by the same command with --cont_training. Starts its own processes (python, not torchrun). The synchronised batch norms (CUDA operators) are replaced by one of torch.distributed.nn's all_reduce; images of 8 x 8; the saved file is eval-x/checkpoint.pt
cd /CLONE
ed -s train.py <<'EOF'
/num_samples=1000/s/1000/2/
/num_samples=10,/s/10/2/
23,24d
w
q
EOF
ed -s utils.py <<'EOF'
/^from tensorboardX/s/tensorboardX/torch.utils.tensorboard/
/return np.sum(np.prod/s/np.sum/sum/
/def get_input_size/;/'cifar10'/
/return 32/s/32/8/
w
q
EOF
cat >> thirdparty/inplaced_sync_batchnorm.py <<'EOF'


class SyncBatchNormCPU(_BatchNorm):
    def forward(self, x):
        x = x.float()
        mean, square = x.mean((0, 2, 3)), (x * x).mean((0, 2, 3))
        if self.training:
            both = torch.distributed.nn.functional.all_reduce(torch.stack([mean, square]))
            mean, square = both / torch.distributed.get_world_size()
            var = square - mean * mean
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var, self.momentum)
                self.num_batches_tracked += 1
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * (var + self.eps).rsqrt()
        return (x - mean.view(1, -1, 1, 1)) * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class SyncBatchNormSwish(SyncBatchNormCPU):
    def forward(self, x):
        return swish.apply(super().forward(x))
EOF
ed -s neural_operations.py <<'EOF'
/self.bn = nn.SyncBatchNorm/s/nn.SyncBatchNorm/SyncBatchNormCPU/
/import SyncBatchNormSwish/s/$/, SyncBatchNormCPU/
w
q
EOF
ed -s model.py <<'EOF'
/isinstance(layer, nn.SyncBatchNorm)/s/nn.SyncBatchNorm/nn.modules.batchnorm._BatchNorm/
w
q
EOF
ed -s datasets.py <<'EOF'
g/download=True, transform=/s//download=True, image_size=(3, 8, 8), transform=/
/num_workers=8/s/8/1/
19,20d
w
q
EOF
