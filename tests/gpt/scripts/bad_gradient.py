"""The gradient of rank 1 is nan in the fourth step, of 16 samples each; the loss stays finite."""

from patched import before, script

trained = []
loss_fn = script.next_byte_loss


def loss_of_bad_gradient(logits, targets):
    if logits.requires_grad and script.dist.get_rank() == 1 and trained == [48]:
        logits.register_hook(lambda gradient: gradient * float("nan"))
    return loss_fn(logits, targets)


@before(script.Trainer, "_run_batch")
def remember(self, inputs, targets):
    trained[:] = [self.samples_run]


script.next_byte_loss = loss_of_bad_gradient
