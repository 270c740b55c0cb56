# https://github.com/dannyadkins/cs244c-llama-zero at 301eeb8f13
# rankcheck --empty --launcher torchrun /CLONE/train_zero.py --zero-stage 2 --seq-len 16 --batch-size 2 --grad-accum-steps 2 --max-steps 20 --max-grad-norm 1 --synthetic-vocab-size 256 --log-interval 5 --checkpoint-interval 5
cd /CLONE
ed -s model/config.py <<'END'
86s/10/2/
85s/4/1/
84s/320/32/
w
END
