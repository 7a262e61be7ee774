"""Trains vision-language models: a vision tower, a projector, and a decoder of ``trainer.lm``.

Engines, checkpoints and the training loop are those of ``trainer.lm``. This package adds the tower, and images in data.
"""
