# https://github.com/BIGBALLON/distribuuuu at eaaa9229ab
# rankcheck --empty /CLONE/tutorial/mnmc_ddp_launch.py
cd /CLONE
ed -s tutorial/mnmc_ddp_launch.py <<'END'
63c
        num_workers=1,
.
17c
EPOCHS = 4
.
16c
BATCH_SIZE = 8
.
w
END
