# https://github.com/StrongResearch/isc-demos at 5f3cab66c3
# rankcheck --empty /CLONE/fashion_mnist/train.py --dataset-id x --epochs 5 --test-epochs 2 --batch-size 8 --save-freq 3
# A restart finds its checkpoint by itself (a symlink in the working folder). stand_ins/cycling_utils is StrongResearch/cycling_utils at c73712836d, without datasets.py: its authors' own library, not a stand-in, so its faults count (one line differs: [strategy_int] in saving.py, for gloo)
cd /CLONE/fashion_mnist
ed -s train.py <<'END'
326s/^/    os.environ.setdefault("LOSSY_ARTIFACT_PATH", ".\/lossy")\
    os.environ.setdefault("CHECKPOINT_ARTIFACT_PATH", ".")\
/
291s/batch_size=64/batch_size=16/
290s/num_workers=3/num_workers=0/
270,271c
    train_transform = Compose([ToTensor()])
    test_transform = Compose([ToTensor()])
.
26s/PILToTensor/PILToTensor, ToTensor/
w
END
ed -s model.py <<'END'
23,32s/\<50\>/4/
23,32s/\<100\>/8/
23,32s/\<500\>/16/
w
END
