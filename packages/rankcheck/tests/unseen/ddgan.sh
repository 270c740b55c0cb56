# https://github.com/NVlabs/denoising-diffusion-gan at 6818ded644
# rankcheck --empty --resume=--resume /CLONE/train_ddgan.py --exp demo --image_size 16 --num_process_per_node 2 --batch_size 8 --num_epoch 2 --num_channels_dae 8 --ch_mult 1 1 --num_res_blocks 1 --ngf 4 --nz 8 --z_emb_dim 8 --t_emb_dim 8 --n_mlp 1 --lazy_reg 4 --save_content --save_content_every 1 --save_ckpt_every 1
# Without --use_ema, whose optimizer torch 2.13 refuses. The CUDA kernels are not built: on CPUs, their files compute without them
cd /CLONE
ed -s train_ddgan.py <<'END'
293c
            shutil.copytree(os.path.join(os.path.dirname(__file__), 'score_sde/models'), os.path.join(exp_path, 'score_sde/models'))
.
248c
                                               num_workers=1,
.
206c
                        lambda image: image.resize((16, 16)),
.
24c
LMDBDataset = None
.
22c
LSUN = None
.
w
END
ed -s score_sde/op/upfirdn2d.py <<'END'
18,24c
upfirdn2d_op = None
.
w
END
ed -s score_sde/op/fused_act.py <<'END'
19,25c
fused = None
.
w
END
