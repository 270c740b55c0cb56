# https://github.com/microsoft/dion at 0a059a4542
# rankcheck --empty /CLONE/train.py --data_dir /DATA/fineweb --optimizer adamw --scalar_opt adamw --no_compile --no_triton --no_wandb --model_dim 32 --n_layer 1 --n_head 2 --batch_size 8 --device_batch_size 2 --sequence_length 16 --num_iterations 20 --checkpoint_freq 5 --checkpoint_dir ckpt --dp_size 1 --fs_size 2 --tp_size 1
# DATA: fineweb/fineweb_train_000001.bin, fineweb_train_000002.bin and fineweb_val_000000.bin: 20000, 20000 and 4000 random uint16 below 200, in the layout that the script reads
cd /CLONE
ed -s train.py <<'END'
787c
    num_vocab = 256
.
55c
    val_tokens: int = 128
.
54c
    val_loss_every: int = 5
.
w
END
