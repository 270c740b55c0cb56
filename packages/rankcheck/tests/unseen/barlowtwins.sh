# https://github.com/facebookresearch/barlowtwins at 8e8d284ca0
# rankcheck --empty /CLONE/main.py . --workers 0 --epochs 4 --batch-size 16 --projector 16-16-16 --print-freq 2
# A restart finds checkpoint/checkpoint.pth by itself
cd /CLONE
ed -s main.py <<'END'
195c
        sizes = [8] + list(map(int, args.projector.split('-')))
.
w
END
