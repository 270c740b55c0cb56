"""What a rank holds: blocks, parts of weights, and the time."""

from patched import after, before, script


@before(script.Block, "forward")
def note_time(self, x):
    script.time_of_block = x.shape[1]


@after(script.Trainer, "_run_batch")
def print_held(self, inputs, targets):
    block = next(self.model.blocks.children())
    weights = [block.qkv.weight, block.proj.weight]
    weights += [block.moe.experts.up] if hasattr(block, "moe") else []
    for weight in weights:
        state = self.optimizer.state[weight]["exp_avg"]
        assert state.placements == weight.grad.placements == weight.placements
    shapes = ["x".join(map(str, weight.to_local().shape)) for weight in weights]
    blocks = len([*self.model.blocks.children()])
    print(f"holds {blocks} x", *shapes, "on", script.time_of_block)
