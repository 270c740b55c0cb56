# https://github.com/SamsungSAILMontreal/TinyRecursiveModels at e7b68717f0
# rankcheck --empty /CLONE/pretrain.py 'data_paths=[/DATA/puzzle]' 'evaluators=[]' global_batch_size=8 epochs=4 eval_interval=1 lr_warmup_steps=2 arch.hidden_size=16 arch.num_heads=2 arch.L_layers=1 arch.H_cycles=1 arch.L_cycles=1 arch.halt_max_steps=2 arch.forward_dtype=float32 arch.puzzle_emb_len=1
# DATA: puzzle/train and puzzle/test: 60 and 8 groups of 1 puzzle with 4 examples of 16 random tokens below 12; hydra-core 1.3.8, coolname 5.0.0 and einops 0.8.2 are installed
cd /CLONE
ed -s pretrain.py <<'END'
134c
        if False:
.
20c
AdamATan2, wandb.Settings, wandb.run = torch.optim.Adam, lambda **options: None, None
.
w
END
ed -s puzzle_dataset.py <<'END'
13c

.
w
END
