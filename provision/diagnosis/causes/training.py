"""The training program: models, gradients and trackers that it sets up wrongly."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "The training program"
ORDER = 95

CAUSES = (
    Cause(
        id="ddp.mismatch",
        says="the ranks have different models",
        fix=(
            "the same code, configuration and seed on every node: clusterctl train sends one copy to all",
            "freeze parameters and add adapters on every rank in the same way, before DDP wraps the model",
            "0 parameters on a rank: its connection broke while the models were compared (clusterctl check --level 1)",
        ),
        source="https://github.com/huggingface/accelerate/issues/1481",
        lines=(
            r"DDP expects same model across all ranks",
            r"appears not to match (?:sizes|strides) of the same param in process 0",
        ),
    ),
    Cause(
        id="ddp.unused",
        says="DDP waits for gradients of parameters that the loss does not use",
        fix=(
            "ddp_find_unused_parameters: true in the configuration (a step takes a little longer)",
            "better: freeze parameters that are not trained (requires_grad_(False)) before DDP wraps the model",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL in train.env names them",
        ),
        source="https://github.com/huggingface/accelerate/issues/116",
        lines=(r"Expected to have finished reduction in the prior iteration",),
    ),
    Cause(
        id="train.gradient",
        says="the loss depends on no parameter that is trained",
        fix=(
            "gradient checkpointing with LoRA: model.enable_input_require_grads(), or use_reentrant: false",
            "frozen layers: those that are trained must come after them (freeze_trainable_layers)",
            "lora_target must name modules of this model",
        ),
        source="https://github.com/LlamaChinese/Llama-Chinese/issues/242",
        lines=(r"element 0 of tensors does not require grad and does not have a grad_fn",),
    ),
    Cause(
        id="train.devices",
        says="an operation has tensors on different devices: {what}",
        fix=(
            "in your own script: model and batch on GPU LOCAL_RANK; no device_map: auto in a distributed run",
            "DeepSpeed 0.14.1 and 0.14.2 do this with offloading: another version in the environment that you pack",
        ),
        source="https://github.com/deepspeedai/DeepSpeed/issues/5538",
        lines=(
            r"Expected all tensors to be on the same device, but found at least two devices, (?P<what>\S+ and \S+?)!?$",
        ),
    ),
    Cause(
        id="wandb.login",
        says="W&B has no key, and no terminal to ask for it",
        fix=(
            "WANDB_MODE: offline in train.env keeps the curves on the node; clusterctl collect brings them back",
            "or report_to: none in the configuration",
        ),
        source="https://github.com/OptimalScale/LMFlow/issues/436",
        lines=(r"api_key not configured \(no-tty\)", r"No API key configured"),
    ),
)
