"""The first parameter of a model is frozen."""

from patched import script


def freeze(model):
    next(model.parameters()).requires_grad_(False)
    return model


names = {"ToyModel", "ConvNet", "GPT"} & {*vars(script)}
for name in names:

    class Frozen(getattr(script, name)):
        def __init__(self, *args):
            super().__init__(*args)
            freeze(self)

    setattr(script, name, Frozen)
if not names:
    from_config = script.AutoModelForCausalLM.from_config
    script.AutoModelForCausalLM.from_config = lambda *args, **o: freeze(from_config(*args, **o))
