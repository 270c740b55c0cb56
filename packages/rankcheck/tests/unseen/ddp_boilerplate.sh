# https://github.com/albertbuchard/slurm-pytorch-ddp-boilerplate at b3a71f50ec
# rankcheck --empty --launcher torchrun /CLONE/main.py --batch-size 8 --test-batch-size 8 --epochs 3 --no-wandb
cd /CLONE
cat > dotenv.py <<'END'
"""Stands in for python-dotenv."""


def load_dotenv():
    pass
END
ed -s main.py <<'END'
10s/=.*/= os.getcwd()/
w
END
ed -s src/ddp/ddp_utils.py <<'END'
117s/int(\(.*\))/\1/
w
END
ed -s src/trainer_v1/configurations/default_configuration.py <<'END'
9,10s/=32\|=64/=4/g
w
END
