"""Checkpoints that are missing, partial, truncated, from another number of ranks or from another model."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "Checkpoints"
ORDER = 70

CAUSES = (
    Cause(
        id="checkpoint.world",
        says="the checkpoint was saved by another number of ranks[: {was} ranks, but the run has {now}]",
        fix=(
            "resume on as many GPUs as before: clusterctl resume RUN with the same nodes",
            (
                "or start from the weights alone: clusterctl collect RUN --fp32 converts any DeepSpeed checkpoint to "
                "fp32 weights; DeepSpeed's universal checkpoint keeps the optimizer"
            ),
        ),
        source="https://github.com/deepspeedai/DeepSpeed/issues/2898",
        lines=(
            r"checkpoint being loaded used a DP world size of (?P<was>\d+) but the current world size is (?P<now>\d+)",
        ),
        traced=(
            (
                r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\) at non-singleton dimension 0",
                r"in _load_zero_checkpoint|in load_checkpoint|in _restore_\w+|success = self\._load_zero_checkpoint",
            ),
        ),
    ),
    Cause(
        id="checkpoint.partial",
        says="a part of the checkpoint is missing[: {path}]",
        fix=(
            ("clusterctl resume RUN uses the newest complete checkpoint, and copies missing files between nodes"),
            (
                "ZeRO writes a zero_pp_rank_N file for each rank on that rank's node, and a single "
                "mp_rank_00_model_states.pt; the ZeRO stage must be the one that saved the checkpoint"
            ),
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/8098",
        lines=(
            (
                r"No such file or directory: "
                r"'(?P<path>[^']*(?:zero_pp_rank_\d+|mp_rank_\d+|_optim_states|_model_states)[^']*)'"
            ),
            (
                r"No such file or directory: "
                r"'(?P<path>[^']*(?:\.distcp|/\.metadata|pytorch_model_fsdp\w*(?:\.bin|/[^']*)))'"
            ),
            r"The following zero checkpoints paths are missing: (?P<path>.+)",
            r"checkpoint .*(?P<path>zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt)",
        ),
        traced=((r"^AssertionError$", r"in check_ckpt_list"),),  # DeepSpeed found no model states
    ),
    Cause(
        id="checkpoint.race",
        says="several ranks renamed or deleted the same checkpoint folder",
        fix=(
            "only one rank may do it: transformers 4.37 or later, and save_on_each_node: false on a shared disk",
            "without a shared disk: an output_dir on each node's own disk",
            "clusterctl resume RUN uses the newest complete checkpoint",
        ),
        source="https://github.com/huggingface/transformers/issues/27925",
        lines=(
            r"\[Errno (?:2|39)\] (?:No such file or directory|Directory not empty): '[^']+' -> '[^']*checkpoint-\d+'",
            r"\[Errno (?:2|39)\] (?:No such file or directory|Directory not empty): '[^']*tmp-checkpoint-[^']*'",
        ),
    ),
    Cause(
        id="checkpoint.deleted",
        says="several ranks deleted the same old checkpoint: {path} no longer exists",
        fix=(
            (
                "with a shared disk only the first rank of the run may delete: save_on_each_node: false, or a larger "
                "save_total_limit"
            ),
            "clusterctl resume RUN uses the newest complete checkpoint",
        ),
        source="https://github.com/huggingface/transformers/issues/20988",
        lines=(r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']+)'",),
        context=r"in _rotate_checkpoints|shutil\.rmtree\(checkpoint",
    ),
    Cause(
        id="checkpoint.missing",
        says="no checkpoint to resume from[ at {path}]",
        fix=(
            (
                "resume_from_checkpoint needs the folder checkpoint-N itself; DeepSpeed's load_checkpoint needs the "
                "folder above it, whose file latest contains the tag's name"
            ),
            "clusterctl resume RUN finds the newest complete checkpoint automatically",
        ),
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py",
        lines=(
            r"Unable to find (?:latest file at )?'?(?P<path>[^',]+?latest)\b",
            r"No valid checkpoint found in output directory \(?(?P<path>[^)]+)\)?",
            r"Can't find a (?:valid )?checkpoint (?:index )?at (?P<path>\S+)",
            r"Error loading checkpoint from (?P<path>\S+)",
            r"Client provided checkpoint load path: (?P<path>\S+) does not exist",
        ),
    ),
    Cause(
        id="checkpoint.weights_only",
        says="torch refuses an object in the checkpoint[: {name}]",
        fix=(
            "from torch 2.6 on torch.load reads only plain data: use the versions that wrote the checkpoint",
            "or newer ones of transformers and DeepSpeed, which allow their own objects",
            "in your own script, for your own checkpoints: torch.load(..., weights_only=False)",
        ),
        source="https://github.com/huggingface/transformers/issues/40500",
        lines=(r"Unsupported global: GLOBAL (?P<name>\S+)", r"Weights only load failed", r"WeightsUnpickler error"),
    ),
    Cause(
        id="checkpoint.torn",
        says="a file of the checkpoint or model is truncated[: {path}]",
        fix=(
            "clusterctl resume RUN recognises a truncated checkpoint and uses the one before it",
            "for a model: compare its size and checksum with the source, and run clusterctl push again",
            "the usual causes are a full disk, or a run that was killed while it saved",
        ),
        source="recorded (torch.load and safetensors on files cut short)",
        lines=(
            r"PytorchStreamReader failed",
            (
                r"Error while deserializing header: "
                r"(?:HeaderTooLarge|HeaderTooSmall|MetadataIncompleteBuffer|Invalid\w+"
                r"|[\w ]*incomplete metadata)"
            ),
            r"SafetensorError: .*(?:header|buffer|[Ii]ncomplete)",
            r"EOFError: Ran out of input",
            r"UnpicklingError: ",
            r"Unable to load weights from pytorch checkpoint file for '(?P<path>[^']+)'",
        ),
    ),
    Cause(
        id="checkpoint.zero3",
        says="the checkpoint has no weights: it was saved under ZeRO-3 without gathering them",
        fix=(
            "clusterctl collect RUN --fp32 makes the weights from the ZeRO checkpoint, if its files still exist",
            "for the next run: stage3_gather_16bit_weights_on_model_save: true in the DeepSpeed configuration",
        ),
        source="https://github.com/huggingface/transformers/issues/20082",
        lines=(r"copying a param with shape torch\.Size\(\[0\]\) from checkpoint",),
    ),
    Cause(
        id="checkpoint.shape",
        says="the checkpoint belongs to another model: {what}",
        fix=(
            ("use the configuration that saved the checkpoint: sizes, LoRA rank and targets, vocabulary"),
            "if tokens were added: resize_vocab: true in both runs",
        ),
        source="https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py",
        lines=(
            r"(?P<what>size mismatch for [^\s:]+)(?!.*current model is torch\.Size\(\[0\]\))",
            r"(?P<what>(?:Missing|Unexpected) key\(s\) in state_dict)",
        ),
    ),
)
