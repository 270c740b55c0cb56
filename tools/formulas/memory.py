"""The memory that a GPU needs to train a model of gpt/, by part, for each way to split it

The peak is at the start of the backward pass, when all activations are kept, or at its end, when
they are freed and the gradients are there. Sizes are in bytes. calculator.py prints them.
"""

from typing import NamedTuple

FLOAT32 = 4  # bytes: weights, gradients and AdamW's averages, the loss

# Per token and entry of the vocabulary, in float32: log-softmax, its gradient, that of the logits.
LOGITS = 3
COMPILED_LOGITS = 2  # in their own type: the logits, from which all else follows; their gradient
CHUNKED_HEAD = 2  # gradients of the head's weights: those of a chunk, and the sum of others

NORM_INPUTS = 2  # per token and channel of a block: of the residual stream, in its type


class Block(NamedTuple):
    """What a block keeps for the backward pass, besides NORM_INPUTS: numbers per token and channel.

    Flash attention keeps no matrix of scores, and no block here has dropout.
    """

    matrix_inputs: float  # outputs of norms; tensor parallelism gathers them, on each rank
    others: float
    backward: float  # in the backward pass of the MLP: gradients, less what is freed by then
    positions: int = 1  # tables of positions, which are learned, or none


KV_SHARE = 1 / 4  # heads of keys and values for one of q in gpt/llama.py
HIDDEN = 8 / 3  # channels of its MLP for one of the model's

BLOCK_TYPES = {  # of files of gpt/
    # The 34 bytes of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), less the masks of
    # dropout: q, k and v; the input of proj; up's output; the input of down, freed in backward.
    "gpt": Block(2, 3 + 1 + 4 + 4, backward=4 + 4 + 1 - 4),
    # q, k and v; attention's output, and again in the order of o_proj; gate, its SiLU, up and
    # their product. gpt/documents.py keeps as much, besides its mask, which all blocks share.
    "llama": Block(2, 1 + 2 * KV_SHARE + 2 + 4 * HIDDEN, backward=1 + 2 * HIDDEN, positions=0),
}


class GPT(NamedTuple):
    """The shape of a model, whose embedding and head have a matrix each."""

    params: float
    n_layer: int
    n_embd: int
    vocab_size: int
    context: int
    block: Block = BLOCK_TYPES["gpt"]

    @property
    def embedding_params(self):
        return (self.vocab_size + self.context * self.block.positions) * self.n_embd

    @property
    def head_params(self):
        return self.vocab_size * self.n_embd

    @property
    def block_params(self):
        return (self.params - self.embedding_params - self.head_params) / self.n_layer

    @property
    def flops_per_token(self):
        """As gpt/pretrain.py counts them: with attention, without the embeddings."""
        multiplied = self.block_params * self.n_layer + self.head_params
        return 6 * multiplied + 12 * self.n_layer * self.n_embd * self.context


def activations(model, samples, number_bytes, block_input_bytes, recompute, tp):
    """Returns the bytes that the backward pass starts with, and what its first block adds."""
    channels = samples * model.context * model.n_embd
    kept = model.block
    split = NORM_INPUTS * block_input_bytes + kept.others * number_bytes
    block = channels * (split / tp + kept.matrix_inputs * number_bytes)
    backward = channels * kept.backward * number_bytes / tp
    if not recompute:
        return model.n_layer * block, backward
    return model.n_layer * channels * block_input_bytes / tp, block + backward


def gathered(model, number_bytes, tp):
    """Returns the bytes, besides shards, at the start, in the middle and at the end of backward."""
    block = model.block_params / tp
    embedding, head = model.embedding_params / tp, model.head_params / tp
    at_start = (embedding + head) * number_bytes
    in_use = 3 * block * number_bytes  # the weights of two blocks, the gradients of one
    if tp > 1:  # embedding and head are gathered and reduced together, at the end
        in_use += block * FLOAT32 + head * number_bytes
        at_end = at_start + (embedding + head) * FLOAT32
        return at_start, max(at_start + in_use, at_end), at_end
    # The gradients that are being summed in float32 are those of a block or, at first, of the head.
    during = embedding * number_bytes + in_use + max(block, head) * FLOAT32
    return at_start, during, embedding * (number_bytes + FLOAT32)


def memory(
    model, samples, number_bytes, shards=1, recompute=False, tp=1, pp=1, compiled=False, chunks=1
):
    """Returns the bytes of each part and, last, of their sum at the peak.

    `shards` is the number of ranks that share the state, with tensor parallelism those of all
    groups; 1 is DDP. `samples` are those of a rank, or of a tensor parallel group of `tp` ranks.
    `number_bytes` is 2 for bfloat16, with autocast or FSDP's mixed precision, and 4 for float32.
    With a pipeline of `pp` equal stages, `samples` are those of a micro-batch. The first stage has
    1 / pp of the blocks and keeps up to pp micro-batches: as many activations as one stage would.
    Of what is `compiled`, the loss is counted; blocks then keep less than this, too. With
    several `chunks`, the logits are those of one, as in gpt/chunked_loss.py.
    """
    weights = FLOAT32 * model.params / shards
    if shards == 1:
        copies = number_bytes * model.params if number_bytes < FLOAT32 else 0  # those of autocast
        at_start = during = copies + weights  # the gradients, in DDP's buckets, which stay
        at_end = 0
        block_input_bytes = FLOAT32  # the residual stream stays so under autocast
    elif pp > 1:
        # A stage is gathered once per step; its gradients are summed after the last micro-batch.
        copies = (number_bytes + FLOAT32) * model.params / (tp * pp)
        at_start = during = at_end = copies
        block_input_bytes = number_bytes
    else:
        at_start, during, at_end = gathered(model, number_bytes, tp)
        copies = max(during, at_end)
        block_input_bytes = number_bytes
    kept, backward = activations(model, samples, number_bytes, block_input_bytes, recompute, tp)
    logit_bytes = COMPILED_LOGITS * number_bytes if compiled else LOGITS * FLOAT32
    logits = samples * model.context * model.vocab_size * logit_bytes / chunks
    if chunks > 1:
        logits += CHUNKED_HEAD * model.head_params * number_bytes
    return {
        "weights": weights,
        "optimizer": 2 * weights,
        "gradients": weights,
        "copies": copies,
        "activations": kept + backward,
        "logits": logits,
        "peak": 3 * weights
        + max(kept / pp + logits + at_start, kept + backward + during, weights + at_end),
    }
