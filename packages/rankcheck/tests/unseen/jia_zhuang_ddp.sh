# https://github.com/jia-zhuang/pytorch-multi-gpu-training at 9353b26c5b
# rankcheck --empty /CLONE/ddp_train.py
cd /CLONE
ed -s ddp_train.py <<'END'
51c
    loss = criterion(outputs[0], labels)
.
30c
batch_size = 4
.
16c
parser.add_argument("--local_rank", type=int, default=os.environ["LOCAL_RANK"])
.
2c

.
w
END
