"""Trains a vision-language model: ``trainer.lm``, whose data and models may have images.

    python -m trainer.vlm --init Qwen2.5-VL-3B --data mixed.jsonl --parts projector,language
    python -m trainer.vlm --vision siglip --init Qwen2.5-1.5B --data captions.jsonl --parts projector

docs/vision.md explains it.
"""

from trainer.lm.__main__ import main
from trainer.lm.errors import exit_with

if __name__ == "__main__":
    exit_with(lambda: main(program="trainer.vlm"))
