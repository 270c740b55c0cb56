# https://github.com/AGI-Arena/MARS at 4831e28eba
# rankcheck --empty --resume=--init_from=resume /CLONE/MARS/train_mars.py --data_path=/DATA --dataset=nano --compile=False --batch_size=2 --block_size=16 --n_embd=32 --n_layer=1 --n_head=2 --gradient_accumulation_steps=2 --max_iters=30 --eval_interval=10 --eval_iters=2 --warmup_iters=5 --always_save_checkpoint=True
# DATA: nano/train.bin and val.bin of 20000 and 4000 random uint16 below 200, and meta.pkl with vocab_size 256
