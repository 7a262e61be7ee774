"""Memory of a GPU and of a node, and disk space, that a setup needs.

Model states: Rajbhandari et al., ZeRO (arXiv 1910.02054, sections 3.1 and 5, figure 1): for each trained parameter 2
bytes of weight, 2 of gradient and 12 of Adam (a 32-bit weight, momentum, variance). Stage 1 shards the 12, stage 2 the
gradients too, stage 3 also the weights.

DeepSpeed 0.19 also needs (``runtime/zero/stage_1_and_2.py``, ``stage3.py``): a bucket of gradients (two with
``overlap_comm``) and its copy during the reduction; a second shard of gradients with accumulation; a 32-bit copy of the
shard's gradients in the optimizer step; in stage 3 the gathered parameters. These do not all exist at the same time, so
the model computes three moments and takes the largest.

Activations are counted as in Korthikanti et al. (arXiv 2205.05198, section 4), layer by layer, for 16-bit numbers and
flash attention, which keeps no seq x seq matrix. Their 34 s b h of a GPT block are 32 without dropout, and 34 again if
attention's result is kept in two layouts. Other blocks keep more: transformers' RMSNorm keeps its input in 32 bits and
two results in 16, SwiGLU four results of the inner width, and transformers' GPT-2 GELU, written in Python, five. The
counts for transformers' models come from ``torch.autograd.graph.saved_tensors_hooks``
(``tests/lm/test_plan_activations.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

from trainer.plan.inputs import GIB, Cluster, Setup, Training, accumulation

_WIDE = 4  # bytes of a 32-bit number
_HALF = 2


_COPIES = 5  # 16-bit copies of a wide block's inputs: of queries, keys, values, gate and up


def layer_bytes(training: Training, *, wide: bool = False, kernels: bool = False) -> int:
    """Bytes per token that one block keeps, with flash attention. For ``wide`` and ``kernels`` see ``Setup``.

    A wide residual stream has 32 bits: a norm keeps its input and its result, and each of the five products behind the
    two norms its own 16-bit copy. Liger's norm keeps its input and those copies, its SwiGLU two inputs and one result.
    """
    shape = training.shape
    hidden, inner = shape.hidden, shape.active_inner
    norms_statistics = 2 * _WIDE
    attention = _HALF * (2 * shape.attention_width + 2 * shape.kv_width) + _WIDE * shape.heads
    if shape.family == "llama":
        norms = shape.norms * (_WIDE + _HALF + _HALF) * hidden
        if kernels:
            norms = shape.norms * (_WIDE if wide else 2 * _HALF) * hidden
        elif wide:
            norms = shape.norms * 2 * _WIDE * hidden
        norms += _COPIES * _HALF * hidden if wide else 0
        return norms + attention + (3 if kernels else 4) * _HALF * inner + norms_statistics
    norms = 2 * (_HALF + _HALF) * hidden
    if training.program == "own":
        return norms + attention + _HALF * hidden + 2 * _HALF * inner + norms_statistics
    return norms + attention + 2 * _HALF * hidden + 5 * _HALF * inner + norms_statistics


def score_bytes(training: Training) -> int:
    """Bytes per token of one block's attention without flash: 5 a s of the paper.

    Softmax's result in 16 bits, dropout's mask in 8 and its result in 16. Without dropout it is less.
    """
    return 5 * training.shape.heads * training.seq


def logit_bytes(training: Training, setup: Setup) -> int:
    """Peak bytes per token of the loss.

    The losses of transformers and of trainer.lm use 32 bits: logits and their gradient in 16 bits, log-softmax and
    its gradient in 32, 12 bytes per token of the vocabulary. A 16-bit loss keeps three times 2. In chunks it is a
    sixteenth.
    """
    each = 6 if training.half_loss else 12
    whole = each * training.shape.vocab
    return whole // 16 if setup.chunked_loss else whole


def kept_bytes(training: Training, setup: Setup) -> float:
    """Bytes that all blocks keep until the backward pass."""
    tokens = setup.micro_batch * training.seq
    outside = 4 * _HALF * training.shape.hidden  # the last norm and the layers around the blocks
    if setup.checkpointing:
        kept = _WIDE if setup.wide else _HALF
        return float(tokens * (training.shape.layers * kept * training.shape.hidden + outside))
    return float(tokens * (training.shape.layers * _block_bytes_per_token(training, setup) + outside))


def block_bytes(training: Training, setup: Setup) -> float:
    """Bytes that one block keeps: the block of the backward pass, recomputed or not yet released."""
    return float(setup.micro_batch * training.seq * _block_bytes_per_token(training, setup))


def logits(training: Training, setup: Setup) -> float:
    """Peak bytes of the loss."""
    return float(setup.micro_batch * training.seq * logit_bytes(training, setup))


def _block_bytes_per_token(training: Training, setup: Setup) -> int:
    each = layer_bytes(training, wide=setup.wide, kernels=setup.kernels)
    return each + (0 if setup.flash else score_bytes(training))


_MASTER = 4  # bytes of a 32-bit weight
_ADAM = 8  # of momentum and variance
# In 8 bits, with a 32-bit scale for every 256 numbers: Dettmers et al., arXiv 2110.02861, section 2 (bitsandbytes takes
# blocks of 256)
_ADAM_8BIT = 2 * (1 + 4 / 256)
_NF4 = 4.127 / 8  # bytes of a 4-bit weight with its doubly quantized constants: QLoRA, arXiv 2305.14314, section 3
CONTEXT = 1.3 * GIB  # CUDA context with library code, and NCCL buffers, outside torch; an estimate
FRAGMENTS = 0.04  # fraction of the allocated memory that torch reserves in addition; an estimate
_GROUP = 1_000_000_000  # elements that stage 3's optimizer processes at a time: sub_group_size


@dataclass(frozen=True)
class Memory:
    """Bytes of a GPU by part, at the peak of a step.

    Attributes:
        parameters: weights.
        gradients: kept between passes.
        optimizer: Adam's states.
        activations: kept by the blocks.
        logits: of the loss.
        buffers: buckets, copies, gathered parameters.
        rest: CUDA, NCCL and fragmentation.
        moment: when the peak is: ``loss``, ``backward`` or ``step``.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    rest: float
    moment: str

    @property
    def allocated(self) -> float:
        """Bytes that torch reports as allocated."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def total(self) -> float:
        """Bytes that nvidia-smi shows."""
        return self.allocated + self.rest

    @property
    def states(self) -> float:
        """Bytes of the model states: parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer


def weight_bytes(training: Training) -> float:
    """Bytes of all weights, unsharded."""
    shape = training.shape
    if training.method != "qlora":
        return 2.0 * (shape.parameters + (training.trained if training.adapters else 0))
    matrices = shape.matrices
    return _NF4 * matrices + 2.0 * (shape.parameters - matrices + training.trained)


def adam_bytes(training: Training) -> float:
    """Bytes per trained parameter of Adam's momentum and variance."""
    return _ADAM_8BIT if training.eight_bit else _ADAM


def states(training: Training, cluster: Cluster, setup: Setup) -> Tuple[float, float, float]:
    """Bytes per GPU of parameters, gradients and optimizer."""
    world, trained = cluster.world, float(training.trained)
    if setup.wide:
        return weight_bytes(training) + 2 * trained, 4 * trained, adam_bytes(training) * trained
    parameters = weight_bytes(training) / (world if setup.stage == 3 else 1)
    gradients = 2 * trained / (world if setup.stage >= 2 else 1)
    optimizer = (_MASTER + adam_bytes(training)) * trained / (world if setup.stage >= 1 else 1)
    if setup.optimizer_at != "gpu":
        optimizer = 0.0
        gradients = 0.0 if setup.stage >= 2 else gradients
    return (0.0 if setup.parameters_at != "gpu" else parameters), gradients, optimizer


def gpu_memory(training: Training, cluster: Cluster, setup: Setup) -> Memory:
    """Return the memory of a GPU at the peak of a step."""
    base = states(training, cluster, setup)
    gathered = 2.0 * min(training.shape.parameters, setup.live) if setup.stage == 3 else 0.0
    bucket = 2.0 * setup.bucket if setup.stage == 3 else 0.0  # allocated at the start and kept
    blocks = kept_bytes(training, setup)
    # Autocast's 16-bit weights, until the backward pass has used them, and the buckets of torch's DDP, as large as the
    # gradients and always there: torchrun starts it also for one process.
    copies, ddp = (2.0 * training.trained, 4.0 * training.trained) if setup.wide else (0.0, 0.0)
    activations, loss, buffers = _backward(training, cluster, setup, blocks)
    moments = (
        (blocks, logits(training, setup), bucket + gathered + copies + ddp, "loss"),
        (activations, loss, buffers + copies + ddp, "backward"),
        (0.0, 0.0, bucket + ddp + _step(training, cluster, setup), "step"),
    )
    activations, loss, buffers, moment = max(moments, key=lambda each: each[0] + each[1] + each[2])
    allocated = sum(base) + activations + loss + buffers
    return Memory(*base, activations, loss, buffers, CONTEXT + FRAGMENTS * allocated, moment)


def _backward(training: Training, cluster: Cluster, setup: Setup, blocks: float) -> Tuple[float, float, float]:
    """Memory when the first bucket is full and being reduced; some blocks have released their activations."""
    trained = training.trained
    done = min(1.0, setup.bucket / trained) if not training.adapters else 0.0
    one = block_bytes(training, setup)
    rest = blocks * (1 - done)
    activations = rest + one if setup.checkpointing else max(rest, one)
    reduced = 2.0 * min(setup.bucket, trained)
    if setup.wide:
        return activations, 0.0, 0.0
    if setup.stage == 0:
        return activations, 0.0, reduced
    if setup.stage == 3:
        gathered = 2.0 * min(training.shape.parameters, setup.live)
        return activations, 0.0, 2.0 * setup.bucket + gathered
    buckets = 2.0 * setup.bucket * (2 if setup.overlap else 1)
    second = 0.0
    if setup.stage == 2 and accumulation(training, cluster, setup) > 1:
        second = 2.0 * trained / cluster.world
    return activations, 0.0, buckets + reduced + second


def _step(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Buffers of the optimizer step: the shard's gradients in 32 bits, and flat in 16; in stage 3 by group."""
    if setup.optimizer_at != "gpu" or setup.wide:  # torch's fused Adam needs no buffers
        return 0.0
    if setup.stage == 0:
        return 4.0 * training.trained  # by parameter, without a flat copy
    shard = training.trained / cluster.world
    return 6.0 * (min(shard, _GROUP) if setup.stage == 3 else shard)


def host_memory(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Bytes of a node's memory that offloading needs.

    18 for each trained parameter of the node's share: Adam's 12, its gradient in 32 bits, and in 16 bits stage 2's new
    weight or stage 3's gradient. Stage 2 with accumulation adds 2 for the sums. With nvme, only the part that DeepSpeed
    processes at a time.
    """
    share = training.trained / cluster.nodes
    held = 0.0
    if setup.optimizer_at == "cpu":
        adds_up = setup.stage == 2 and accumulation(training, cluster, setup) > 1
        held += (20.0 if adds_up else 18.0) * share
    elif setup.optimizer_at == "nvme":
        held += 16.0 * min(share, _GROUP * cluster.gpus) + 2.0 * share
    if setup.parameters_at == "cpu":
        held += weight_bytes(training) / cluster.nodes
    elif setup.parameters_at == "nvme":
        held += 2.0 * min(training.shape.parameters / cluster.nodes, _GROUP * cluster.gpus)
    return held


def loading_memory(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Bytes of a node's memory while a checkpoint is loaded.

    transformers 5.6 loads each weight from the file to the GPU (LLaMA-Factory's ``low_cpu_mem_usage``, its default).
    In stage 3 every process first reads the whole checkpoint (``integrations/deepspeed.py``).
    """
    if setup.stage != 3 or training.program == "own":
        return 0.0
    return 2.0 * training.shape.parameters * cluster.gpus


def disk(training: Training, cluster: Cluster, setup: Setup) -> float:
    """Bytes of a node's fast disk that offloading needs: Adam's states with their gradients, and the parameters."""
    adam = 16.0 * training.trained if setup.optimizer_at == "nvme" else 0.0
    return (adam + (weight_bytes(training) if setup.parameters_at == "nvme" else 0.0)) / cluster.nodes
