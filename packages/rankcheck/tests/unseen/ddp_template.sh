# https://github.com/howardlau1999/pytorch-ddp-template at d907ac5dc9
# rankcheck --empty /CLONE/ddp.py --per_gpu_train_batch_size 16 --num_train_epochs 2 --save_steps 8 --logging_steps 5 --warmup_steps 5
# It writes outputs/checkpoint-N but reads nothing at a restart. Its data is random and seeded already, only fewer samples are drawn
cd /CLONE
ed -s ddp.py <<'END'
135s/100000/640/
w
END
