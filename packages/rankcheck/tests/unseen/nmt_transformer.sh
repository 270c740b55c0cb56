# https://github.com/cordercorder/NMT at cbc5ad010c
# rankcheck --empty --resume='--load ckpt/model_0_10 --start_epoch 1' /CLONE/trainer/multi_gpu_train_transformer.py --device_id 0 1 --num_layers 1 --d_model 32 --num_heads 2 --d_ff 32 --src_language fa --tgt_language zh --src_path /DATA/nmt.src --tgt_path /DATA/nmt.tgt --src_vocab_path vocab/src --tgt_vocab_path vocab/tgt --rebuild_vocab --checkpoint ckpt/model --dropout 0.1 --optim_method adam_inverse_sqrt --warmup_updates 4 --end_epoch 3 --batch_size 4 --update_freq 2
# DATA: nmt.src and nmt.tgt: 80 lines of 4 to 12 random numbers below 50
cd /CLONE
ed -s trainer/multi_gpu_train_transformer.py <<'END'
1s|^|import sys; sys.path.append("/CLONE"); |
w
END
ed -s utils/data_loader.py <<'END'
87s/ParallelSentenceBatch(\(.*\))/\1/
w
END
