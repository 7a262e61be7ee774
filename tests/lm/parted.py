"""``session.py`` with a decoder that has the parts of a vision-language model: its first layer is the vision tower."""

import runpy
from pathlib import Path

from trainer.lm.model import Decoder


def part_of(_, name):
    return "vision" if name.startswith("layers.0.") else "projector" if name.startswith("embed.") else "language"


Decoder.part_of = part_of
runpy.run_path(str(Path(__file__).with_name("session.py")), run_name="__main__")
