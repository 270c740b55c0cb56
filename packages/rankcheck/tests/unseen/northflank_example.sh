# https://github.com/northflank-examples/distributed-pytorch-example at c0da3c528b
# rankcheck --empty --resume "--resume checkpoints/latest_model.pt" /CLONE/train.py --epochs 4 --batch-size 16 --num-samples 320
# No line is changed: its data is random already (and not seeded, which is its own fault). It saves into ./checkpoints
cd /CLONE
