"""Makes pretrain.npz and sft.npz: pictures of coloured shapes with captions, without a network."""

import os

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SIZE, LENGTH = 32, 24


def picture(random, shape, colour):
    image = np.full((SIZE, SIZE, 3), 255, np.uint8)
    y, x = np.mgrid[:SIZE, :SIZE] - random.integers(12, 20, (2, 1, 1))
    inside = {"circle": x**2 + y**2 < 81, "square": np.maximum(abs(x), abs(y)) < 8, "bar": abs(y) < 4}[shape]
    image[inside] = COLOURS[colour]
    return image.transpose(2, 0, 1)


def make(name, count, text):
    random = np.random.default_rng(len(name))
    images = np.empty((count, 3, SIZE, SIZE), np.uint8)
    captions = np.zeros((count, LENGTH), np.uint8)  # bytes of UTF-8, 0 after the end
    for number in range(count):
        shape, colour = random.choice(["circle", "square", "bar"]), random.choice(list(COLOURS))
        images[number] = picture(random, shape, colour)
        caption = text.format(shape=shape, colour=colour).encode()[:LENGTH]
        captions[number, : len(caption)] = list(caption)
    np.savez(os.path.join(HERE, f"{name}.npz"), images=images, captions=captions)
    print(f"{name}: {count} pictures")


make("pretrain", 256, "a {colour} {shape}")
make("sft", 128, "the {shape} is {colour}")
