# https://github.com/jingyaogong/minimind at d65ef2c00e
# rankcheck --empty /CLONE/trainer/train_pretrain.py --data_path none --save_dir out --hidden_size 64 --num_hidden_layers 1 --max_seq_len 32 --epochs 3 --batch_size 4 --accumulation_steps 2 --num_workers 1 --log_interval 2 --save_interval 3 --from_resume 1
# STAND-INS: without them, since transformers takes the one for torchvision
cd /CLONE
cat > trainer/datasets.py <<'END'
"""Stands in for datasets: 80 short texts."""

Features = Sequence = Value = None


def load_dataset(kind, data_files, split):
    return [{"text": f"{i} and {i * i} " * (i % 4 + 1)} for i in range(80)]
END
ed -s trainer/train_pretrain.py <<'END'
117s|'../checkpoints'|'checkpoints'|
69s|'../checkpoints'|'checkpoints'|
w
END
ed -s trainer/trainer_utils.py <<'END'
119s|'../model'|'/CLONE/model'|
w
END
