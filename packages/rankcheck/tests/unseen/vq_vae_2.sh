# https://github.com/rosinality/vq-vae-2-pytorch at ef5f67c46f
# rankcheck --empty /CLONE/train_vqvae.py --n_gpu 2 --size 32 --epoch 4 .
cd /CLONE
ed -s train_vqvae.py <<'END'
101c
        dataset, batch_size=16 // args.n_gpu, sampler=sampler, num_workers=2
.
94c
            transforms.Normalize(),
.
84a
    os.makedirs("checkpoint", exist_ok=True)
.
w
END
ed -s vqvae.py <<'END'
172c
        n_embed=32,
.
168c
        channel=8,
.
w
END
