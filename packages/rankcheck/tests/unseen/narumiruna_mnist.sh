# https://github.com/narumiruna/pytorch-distributed-example at e6d2beb002
# rankcheck --empty --launcher torchrun /CLONE/mnist/main.py --epochs 4 --batch-size 8
cd /CLONE
ed -s mnist/main.py <<'END'
187c
    args = parser.parse_args(); import os; args.rank, args.world_size, args.init_method = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"
.
w
END
