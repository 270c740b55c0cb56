# https://github.com/aivanou/disttraining at 8a994743e5
# rankcheck --empty --launcher torchrun /CLONE/apps/charnn/main.py dataset.path=/DATA/charnn.txt trainer.max_epochs=3 trainer.batch_size=5 +trainer.checkpoint_path=model.pt model.n_layer=1 model.n_head=2 model.n_embd=32
# DATA: charnn.txt: 240 random letters of abcdefgh
cd /CLONE
cat > apps/charnn/hydra.py <<'END'
"""Stands in for hydra: the YAML file beside the script, and key=value arguments."""

import os
import sys

import yaml


def main(config_path, config_name):
    def decorate(function):
        def run():
            folder = os.path.dirname(os.path.abspath(__file__))
            with open(os.path.join(folder, config_path, f"{config_name}.yaml")) as file:
                config = yaml.safe_load(file)
            for argument in sys.argv[1:]:
                names, value = argument.removeprefix("+").split("=", 1)
                *groups, name = names.split(".")
                group = config
                for key in groups:
                    group = group[key]
                group[name] = yaml.safe_load(value)
            function(config)

        return run

    return decorate
END
echo 'DictConfig = dict' > apps/charnn/omegaconf.py
for file in model.py model_fsdp.py; do
    ed -s apps/charnn/$file <<'END'
/_checkpoint\._checkpoint_wrapper/s/\._checkpoint_wrapper/.checkpoint_wrapper/
w
END
done
