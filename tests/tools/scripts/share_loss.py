"""Each rank has the mean loss of all, so what save_after_failure.py estimates by it is exact."""

from patched import after, script


@after(script.Trainer, "_run_batch")
def share_loss(self, inputs, targets):
    script.dist.all_reduce(self.totals)
    self.totals /= script.dist.get_world_size()
