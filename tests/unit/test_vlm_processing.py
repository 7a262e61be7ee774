"""How a model sees images, read from its folder: every field that is missing or wrong is named with its file."""

import json
from dataclasses import replace

import pytest

from trainer.lm.errors import RefusedError
from trainer.vlm.processing import of_shape, of_tower
from trainer.vlm.shape import Tower, VlmShape

QWEN = VlmShape(
    2, 2, 64, 512, 300, kind="qwen2_5_vl", image_token=7, tower=Tower("qwen2_5_vl", side=0, merge=2, window=112)
)
ONEVISION = VlmShape(2, 2, 64, 512, 300, image_token=9, pinpoints=((384, 384), (384, 1152), (2304, 2304)))
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}


@pytest.fixture
def folder(tmp_path):
    def made(preprocessor, name="preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(preprocessor))
        return tmp_path

    return made


def test_qwen_has_limits_of_pixels_and_the_trainer_may_lower_the_upper(folder):
    found = of_shape(QWEN, folder({**HALVES, "min_pixels": 3136, "max_pixels": 12845056}), max_pixels=10**6)
    assert (found.kind, found.token, found.patch, found.merge, found.window_side) == ("qwen2_5_vl", 7, 14, 2, 4)
    assert (found.min_pixels, found.max_pixels) == (3136, 10**6)
    assert found.has_positions


def test_both_names_of_the_limits_are_read(folder):
    sizes = {"shortest_edge": 5000, "longest_edge": 60000}
    found = of_shape(QWEN, folder({"image_processor": {"size": sizes}}, "processor_config.json"))
    assert (found.min_pixels, found.max_pixels) == (5000, 60000)


def test_onevision_has_the_grids_of_at_most_nine_tiles(folder):
    found = of_shape(ONEVISION, folder(HALVES))
    assert found.grids == ((1, 1), (1, 3))
    assert (found.token, found.side, found.mean, found.std) == (9, 27, (0.5,) * 3, (0.25,) * 3)
    assert of_shape(ONEVISION, folder(HALVES), tiles=2).grids == ((1, 1),)


def test_a_tower_gets_every_grid(folder):
    found = of_tower(Tower("clip", side=336), folder(HALVES), tiles=3)
    assert found.grids == ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))
    assert (found.side, found.token) == (24, -1)


def test_a_tower_of_siglip_has_other_colours_than_one_of_clip(folder):
    siglip, clip = (of_tower(Tower(kind), folder({})) for kind in ("siglip", "clip"))
    assert siglip.mean == siglip.std == (0.5, 0.5, 0.5)
    assert clip.mean[0] == 0.48145466


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RefusedError, match=r"preprocessor_config\.json cannot be read"):
        of_shape(QWEN, tmp_path)


@pytest.mark.parametrize(
    ("shape", "preprocessor", "says"),
    [
        (QWEN, [], r"preprocessor_config\.json is not a JSON object"),
        (QWEN, {"image_mean": [0.5]}, "preprocessor_config.json: the field 'image_mean' is not a list of 3 numbers"),
        (QWEN, {"image_std": [0, 1, 1]}, "the field 'image_std' is not"),
        (QWEN, {"image_mean": ["a", 1, 1]}, "the field 'image_mean' is not"),
        (QWEN, {"min_pixels": True}, "the field 'min_pixels' is True"),
        (QWEN, {"max_pixels": 100}, "at least 3136 pixels, but at most 100 are allowed"),
        (QWEN, {"size": {"longest_edge": "a"}}, "preprocessor_config.json: size: the field 'longest_edge' is a"),
        (replace(ONEVISION, pinpoints=((3840, 3840),)), {}, "has no size with at most 9 tiles"),
        (replace(ONEVISION, tower=Tower(side=1 << 15)), {}, "tiles of 32768 pixels"),
    ],
)
def test_what_is_wrong_is_named(folder, shape, preprocessor, says):
    with pytest.raises(RefusedError, match=says):
        of_shape(shape, folder(preprocessor))
