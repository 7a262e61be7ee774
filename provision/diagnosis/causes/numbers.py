"""Invalid numbers in training, and inconsistent DeepSpeed configurations."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "Numbers and DeepSpeed's configuration"
ORDER = 90

_CALM = (
    "check the data first: empty answers, broken examples and labels that are all ignored cause such losses",
    "a lower learning_rate, warm-up (warmup_ratio: 0.03), max_grad_norm: 1.0",
    "bf16: true instead of fp16 from Ampere on: it has the range of fp32 and needs no loss scale",
    "clusterctl resume RUN resumes from the newest checkpoint; choose one from before the loss went wrong",
)

CAUSES = (
    Cause(
        id="fp16.scale",
        says="fp16: the loss scale is at its minimum and gradients still overflow",
        fix=(
            "bf16: true instead of fp16 from Ampere on (A100, RTX 30): no loss scale and no such overflow",
            (
                "a model that was trained in bf16 overflows in fp16: on older GPUs use fp32, or LoRA with a lower "
                "learning rate"
            ),
            "a lower learning_rate, longer warm-up, max_grad_norm: 1.0; examples whose labels are all ignored give NaN",
            "a larger initial or fixed loss_scale only delays it",
        ),
        source="https://github.com/deepspeedai/DeepSpeedExamples/issues/418",
        lines=(
            r"Current loss scale already at minimum",
            r"Minimum loss scale reached",
        ),
    ),
    Cause(
        id="nan.raised",
        says="a loss or gradient became NaN or infinite",
        fix=_CALM,
        source="recorded (torch, a learning rate far too high)",
        lines=(
            (
                r"(?i)(?:loss|gradients?|norm)\b[^.]{0,40}\b(?:is|are|contains?|became|has)\s+(?:nan|inf|not "
                r"finite|non-finite)"
            ),
            r"(?i)(?:FloatingPointError|ValueError|RuntimeError): .*\b(?:nan|non-finite)\b",
            r"probability tensor contains either `inf`, `nan`",
            r"Function '\w+' returned nan values in its \d+th output",
        ),
        traced=((r"^AssertionError$", r"assert all_(?:groups|grad)_norm ?>"),),  # DeepSpeed: the norm is NaN or 0
    ),
    Cause(
        id="nan.seen",
        says="the loss became NaN or infinite[ (step {step})]",
        fix=_CALM,
        source="recorded (trainer_log.jsonl)",
        lines=(
            r"'(?:loss|grad_norm)': '?(?:nan|inf)'?",
            r"\b(?:iter|step) (?P<step>\d+): (?:train )?loss (?:nan|inf)\b",
            r"\bloss[:=] ?(?:nan|inf)\b",
        ),
        events=({"event": "progress", "loss": r"^None$", "step": r"(?P<step>\d+)"},),
        grade="late",
        lasting=True,
    ),
    Cause(
        id="deepspeed.batch",
        says="DeepSpeed: train_batch_size {total} is not {micro} (per GPU) x {steps} (accumulation) x {ranks} (ranks)",
        fix=(
            'give two of the three and omit the third, or set all of them to "auto" with transformers\' Trainer',
            (
                "ranks is the number of GPUs of the whole run, so it changes with the number of nodes; 1 means that "
                "the processes were not started as one run"
            ),
        ),
        source="https://github.com/deepspeedai/DeepSpeed/issues/6914",
        lines=(
            (
                r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size ?"
                r"(?P<total>\d+) != (?P<micro>\d+) \* (?P<steps>\d+) \* (?P<ranks>\d+)"
            ),
        ),
    ),
    Cause(
        id="deepspeed.batch.zero",
        says="DeepSpeed: {what} has to be greater than 0",
        fix=(
            (
                "train_batch_size is smaller than the number of ranks, or not a multiple of it: raise it, or omit it "
                "and give train_micro_batch_size_per_gpu"
            ),
        ),
        source="https://github.com/LIN-SHANG/InstructERC/issues/16",
        lines=(
            (
                r"(?P<what>Micro batch size per gpu|Gradient accumulation steps|Train batch size): -?\d+ has "
                r"to be greater than 0"
            ),
        ),
    ),
    Cause(
        id="deepspeed.auto",
        says='DeepSpeed does not understand "auto"',
        fix=(
            'only transformers\' Trainer (and so LLaMA-Factory) replaces "auto": your own script needs numbers',
            "pass the DeepSpeed configuration to the Trainer (deepspeed: in the YAML), not to deepspeed.initialize",
        ),
        source='recorded (DeepSpeed 0.19, a configuration with "auto" in a plain script)',
        lines=(
            r"input_value='auto'",
            r"invalid literal for int\(\) with base 10: 'auto'|could not convert string to float: 'auto'",
            r"(?:'>'|'<'|'<='|'>='|'==') not supported between instances of 'str' and 'int'",
            r"unsupported operand type\(s\) for [*/%]+: '(?:str|int)' and '(?:int|str)'",
        ),
        context=r"deepspeed/runtime/(?:config|engine)\.py|DeepSpeedConfig|validation errors? for DeepSpeed",
    ),
    Cause(
        id="deepspeed.mismatch",
        says="the DeepSpeed configuration contradicts the training arguments",
        fix=('use "auto" in the DeepSpeed configuration for these values; the lines below it name them',),
        source="https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/deepspeed.py",
        lines=(r"correct the following DeepSpeed config values that mismatch TrainingArguments",),
        more=6,
    ),
    Cause(
        id="deepspeed.optimizer",
        says="DeepSpeed refuses this optimizer with offloading",
        fix=(
            'set "optimizer" in the DeepSpeed configuration (type AdamW), so that DeepSpeed uses its CPU Adam',
            'or set "zero_force_ds_cpu_optimizer": false there',
        ),
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py",
        lines=(r"You are using ZeRO-Offload with a client provided optimizer",),
    ),
    Cause(
        id="deepspeed.no_sync",
        says="this DeepSpeed refuses no_sync with ZeRO {stage}, and this transformers or accelerate calls it",
        fix=(
            "transformers 4.48 or later, which does not call it, or DeepSpeed 0.15.4: in the environment that you pack",
            "in your own script: without accelerator.no_sync and model.no_sync; DeepSpeed accumulates gradients itself",
        ),
        source="https://github.com/huggingface/transformers/pull/35157",
        lines=(
            r"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage (?P<stage>\d)",
        ),
    ),
    Cause(
        id="zero3.partitioned",
        says="the program uses a parameter that ZeRO-3 has partitioned, without gathering it",
        fix=(
            "start it with a launcher, also on one GPU: clusterctl train; by hand FORCE_TORCHRUN=1 with LLaMA-Factory",
            "quantized models (QLoRA) and models that skip modules in some steps: ZeRO-2",
            "in your own script: deepspeed.zero.GatheredParameters around the access",
        ),
        source="https://deepspeed.readthedocs.io/en/latest/zero3.html",
        lines=(
            r"RuntimeError: 'weight' must be 2-D",
            r"'status': 'NOT_AVAILABLE'",
            r"which has shape torch\.Size\(\[0\]\)\), this looks? incorrect",
            r"from checkpoint, the shape in current model is torch\.Size\(\[0\]\)",
        ),
    ),
    Cause(
        id="deepspeed.config",
        says="the DeepSpeed configuration is invalid[: {what}]",
        fix=("DeepSpeed does not know a key or a value (comments are allowed); the lines around it name it",),
        source="recorded (DeepSpeed 0.19, stage 7)",
        lines=(
            r"DeepSpeedConfigError: (?P<what>.+)",
            r"(?P<what>Expected a string path to an existing deepspeed config.*)",
            r"(?P<what>\d+ validation errors? for DeepSpeed\w+)",
        ),
    ),
)
