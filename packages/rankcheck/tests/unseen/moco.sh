# https://github.com/facebookresearch/moco at 7397dfe146
# rankcheck --empty --resume "--resume checkpoint_0000.pth.tar" /CLONE/main_moco.py --lr 0.03 --batch-size 16 --epochs 4 -j 2 --moco-dim 16 --moco-k 64 --moco-t 0.2 --mlp --aug-plus --cos --print-freq 2 --dist-url tcp://localhost:10001 --multiprocessing-distributed --world-size 1 --rank 0 data
# Starts its own processes (mp.spawn, python). Saves checkpoint_0000.pth.tar to _0003 after the epochs, to be resumed by name (line two takes the first). At its newest revision (2026) the repository is empty
cd /CLONE
ed -s main_moco.py <<'EOF'
/correct_k = correct/s/view(-1)/reshape(-1)/
w
q
EOF
