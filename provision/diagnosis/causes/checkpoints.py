"""Checkpoints: missing, partial, torn, of other ranks or another model."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

CAUSES = (
    Cause(
        id="checkpoint.world",
        says="the checkpoint is of {was} ranks, and the run has {now}",
        fix=(
            "resume on as many GPUs as before: clusterctl resume RUN with the same nodes",
            (
                "or go on from the weights alone: clusterctl collect RUN makes fp32 weights of any "
                "DeepSpeed checkpoint; "
                "DeepSpeed's universal checkpoint keeps the optimizer"
            ),
        ),
        source="https://github.com/deepspeedai/DeepSpeed/issues/2898",
        lines=(
            r"checkpoint being loaded used a DP world size of (?P<was>\d+) but the current world size is (?P<now>\d+)",
        ),
    ),
    Cause(
        id="checkpoint.partial",
        says="a part of the checkpoint is missing: {path}",
        fix=(
            (
                "clusterctl resume RUN takes the newest complete checkpoint, and copies between nodes what "
                "one of them lacks"
            ),
            (
                "ZeRO writes one zero_pp_rank_N file for each rank, each on its own node's disk, and one "
                "mp_rank_00_model_states.pt (not one a GPU); the stage must be that of the run which saved it"
            ),
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/8098",
        lines=(
            (
                r"No such file or directory: "
                r"'(?P<path>[^']*(?:zero_pp_rank_\d+|mp_rank_\d+|_optim_states|_model_states)[^']*)'"
            ),
            r"The following zero checkpoints paths are missing: (?P<path>.+)",
            r"checkpoint .*(?P<path>zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt)",
        ),
    ),
    Cause(
        id="checkpoint.missing",
        says="there is no checkpoint to go on from[ at {path}]",
        fix=(
            (
                "resume_from_checkpoint names the folder checkpoint-N itself; DeepSpeed's "
                "load_checkpoint the folder above, "
                "in which the file latest holds the tag's name"
            ),
            "clusterctl resume RUN finds the newest complete one itself",
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
        id="checkpoint.torn",
        says="a file of the checkpoint or model is torn: it was not written to its end[: {path}]",
        fix=(
            "clusterctl resume RUN recognises a torn checkpoint and takes the one before it",
            "a model: compare its size and checksum with the source, and clusterctl push it again",
            "it comes of a disk that was full, or a run that was killed while it saved",
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
        id="checkpoint.shape",
        says="the checkpoint is of another model: {what}",
        fix=(
            (
                "the configuration must be the one that the checkpoint was made with: sizes, LoRA rank and targets, "
                "vocabulary"
            ),
            "after tokens were added: resize_vocab: true in both runs",
        ),
        source="https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py",
        lines=(r"(?P<what>size mismatch for \S+)", r"(?P<what>Error\(s\) in loading state_dict for \w+)"),
    ),
)
