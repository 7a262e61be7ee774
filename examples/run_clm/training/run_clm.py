"""Fine-tunes or trains a causal language model with transformers' Trainer.

    deepspeed --num_gpus=4 --module training.run_clm --model_name_or_path /path/to/llama-7b --dataset_name wikitext \
        --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --deepspeed ds_config.json --output_dir ./output

``--dataset_name`` is a folder with train.txt and validation.txt, or, with a network, a data set of the hub.
"""

import logging
import math
import os
import sys
from dataclasses import dataclass, field
from itertools import chain

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with a model, or a name of the hub."})
    from_scratch: bool = field(default=False, metadata={"help": "Random weights in the shape of the model."})


@dataclass
class DataArguments:
    dataset_name: str = field(default="data/wikitext", metadata={"help": "A folder, or a name of the hub."})
    dataset_config_name: str = field(default="wikitext-2-raw-v1", metadata={"help": "The configuration on the hub."})
    block_size: int = field(default=1024, metadata={"help": "Tokens of an example."})
    max_eval_samples: int = field(default=0, metadata={"help": "0: all."})


class Blocks(torch.utils.data.Dataset):
    """Texts as blocks of ``block_size`` tokens; the rest is dropped."""

    def __init__(self, texts, tokenizer, block_size):
        ids = list(chain.from_iterable(tokenizer(text)["input_ids"] for text in texts if text.strip()))
        count = len(ids) // block_size
        self.blocks = torch.tensor(ids[: count * block_size]).view(count, block_size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index].clone()}


def read_texts(data):
    """The lines of the training and of the validation part."""
    if os.path.isdir(data.dataset_name):
        parts = []
        for name in ("train.txt", "validation.txt"):
            with open(os.path.join(data.dataset_name, name), encoding="utf-8") as file:
                parts.append(file.read().splitlines())
        return parts
    from datasets import load_dataset

    loaded = load_dataset(data.dataset_name, data.dataset_config_name)
    return [loaded["train"]["text"], loaded["validation"]["text"]]


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
        level=training_args.get_process_log_level(),
    )
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    logger.warning(
        "Process rank: %s, device: %s, n_gpu: %s, 16-bits training: %s",
        training_args.local_rank, training_args.device, training_args.n_gpu, training_args.fp16,
    )  # fmt: skip
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    if model_args.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_args.model_name_or_path))
    else:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    train, validation = (Blocks(texts, tokenizer, data_args.block_size) for texts in read_texts(data_args))
    if data_args.max_eval_samples:
        validation.blocks = validation.blocks[: data_args.max_eval_samples]

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    checkpoint = training_args.resume_from_checkpoint
    if checkpoint is None and os.path.isdir(training_args.output_dir):
        checkpoint = get_last_checkpoint(training_args.output_dir)
        if checkpoint is not None:
            logger.info("Checkpoint detected, resuming training at %s", checkpoint)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", {**result.metrics, "train_samples": len(train)})
    trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 100))
        trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
