"""The numbers of the training itself, and a DeepSpeed configuration that does not add up."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

_CALM = (
    "find the data first: empty answers, broken examples, labels that are all ignored give such losses",
    "a lower learning_rate, warm-up (warmup_ratio: 0.03), max_grad_norm: 1.0",
    "bf16: true in place of fp16 from Ampere on: it has the range of fp32 and needs no loss scale",
    "clusterctl resume RUN goes on from the newest checkpoint; take one from before the loss went wrong",
)

CAUSES = (
    Cause(
        id="fp16.scale",
        says="fp16: the loss scale is at its minimum and gradients still overflow",
        fix=(
            "bf16: true in place of fp16 from Ampere on (A100, RTX 30): no loss scale, no overflow of this kind",
            (
                "a model that was trained in bf16 overflows in fp16: on older GPUs fp32 for it, or LoRA with a lower "
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
        says="a loss or gradient is no number any more (NaN or infinite)",
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
    ),
    Cause(
        id="nan.seen",
        says="the loss is no number any more[ (step {step})]",
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
        says="DeepSpeed: train_batch_size {total} is not {micro} (a GPU) x {steps} (accumulation) x {ranks} (ranks)",
        fix=(
            'give two of the three and leave the third out, or all of them "auto" with transformers\' Trainer',
            (
                "ranks is the number of GPUs of the whole run: another number of nodes changes it; 1 means that the "
                "processes were not started as one run"
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
                "train_batch_size is smaller than the number of ranks, or not a multiple of it: raise "
                "it, or leave it out "
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
        says='DeepSpeed does not know "auto"',
        fix=(
            'only transformers\' Trainer (so LLaMA-Factory) fills "auto" in: a script of your own needs numbers there',
            "and the DeepSpeed configuration must reach the Trainer (deepspeed: in the YAML), not deepspeed.initialize",
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
        fix=('"auto" in the DeepSpeed configuration for what the arguments say; the lines below it name the values',),
        source="https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/deepspeed.py",
        lines=(r"correct the following DeepSpeed config values that mismatch TrainingArguments",),
        more=6,
    ),
    Cause(
        id="deepspeed.optimizer",
        says="DeepSpeed refuses this optimizer together with offloading",
        fix=(
            'leave "optimizer" to the DeepSpeed configuration (type AdamW), which takes its own CPU Adam',
            'or "zero_force_ds_cpu_optimizer": false there',
        ),
        source="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/engine.py",
        lines=(r"You are using ZeRO-Offload with a client provided optimizer",),
    ),
    Cause(
        id="deepspeed.config",
        says="the DeepSpeed configuration cannot be used[: {what}]",
        fix=(
            "keys and values must be ones that DeepSpeed knows (comments are allowed); the lines around it say which",
        ),
        source="recorded (DeepSpeed 0.19, stage 7)",
        lines=(
            r"DeepSpeedConfigError: (?P<what>.+)",
            r"(?P<what>Expected a string path to an existing deepspeed config.*)",
            r"(?P<what>\d+ validation errors? for DeepSpeed\w+)",
        ),
    ),
)
