"""How a model sees images, read from its folder: every field that is missing or wrong is named with its file."""

import json

import pytest

from trainer.lm.errors import RefusedError
from trainer.vlm import processing

QWEN = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 7,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
}
ONEVISION = {
    "model_type": "llava_onevision",
    "image_token_index": 9,
    "image_grid_pinpoints": [[384, 384], [384, 1152], [2304, 2304]],
    "vision_config": {"patch_size": 14, "image_size": 384},
}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}


@pytest.fixture
def folder(tmp_path):
    def made(config, preprocessor, name="preprocessor_config.json"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / name).write_text(json.dumps(preprocessor))
        return tmp_path

    return made


def test_qwen_has_limits_of_pixels_and_the_trainer_may_lower_the_upper(folder):
    found = processing.read(folder(QWEN, {**HALVES, "min_pixels": 3136, "max_pixels": 12845056}), max_pixels=10**6)
    assert (found.kind, found.token, found.patch, found.merge, found.window_side) == ("qwen2_5_vl", 7, 14, 2, 4)
    assert (found.min_pixels, found.max_pixels) == (3136, 10**6)
    assert found.has_positions


def test_both_names_of_the_limits_are_read(folder):
    sizes = {"shortest_edge": 5000, "longest_edge": 60000}
    found = processing.read(folder(QWEN, {"image_processor": {"size": sizes}}, "processor_config.json"))
    assert (found.min_pixels, found.max_pixels) == (5000, 60000)


def test_onevision_has_the_grids_of_at_most_nine_tiles(folder):
    found = processing.read(folder(ONEVISION, HALVES))
    assert found.grids == ((1, 1), (1, 3))
    assert (found.token, found.side, found.mean, found.std) == (9, 27, (0.5,) * 3, (0.25,) * 3)
    assert processing.read(folder(ONEVISION, HALVES), tiles=2).grids == ((1, 1),)


def test_a_tower_gets_every_grid(folder):
    tower = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    found = processing.of_tower(folder(tower, HALVES), tiles=3)
    assert found.grids == ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))
    assert (found.side, found.token) == (24, -1)


def test_a_tower_of_siglip_has_other_colours_than_one_of_clip(folder):
    vision = {"image_size": 384, "patch_size": 14}
    siglip, clip = (
        processing.of_tower(folder({"model_type": kind, "vision_config": vision}, {})) for kind in ("siglip", "clip")
    )
    assert siglip.mean == siglip.std == (0.5, 0.5, 0.5)
    assert clip.mean[0] == 0.48145466


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RefusedError, match=r"config\.json cannot be read"):
        processing.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "preprocessor", "says"),
    [
        ([], {}, r"config\.json is not a JSON object"),
        ({"model_type": "bert"}, {}, r"config\.json: the model_type is 'bert', and trainer\.vlm trains"),
        ({**QWEN, "image_token_id": None}, {}, "config.json: the field 'image_token_id' is None, not a number"),
        ({**QWEN, "vision_config": 7}, {}, "config.json: the field 'vision_config' is missing or not an object"),
        ({**QWEN, "vision_config": {"patch_size": 0}}, {}, "config.json: vision_config: the field 'patch_size' is 0"),
        (QWEN, {"image_mean": [0.5]}, "preprocessor_config.json: the field 'image_mean' is not a list of 3 numbers"),
        (QWEN, {"image_std": [0, 1, 1]}, "the field 'image_std' is not"),
        (QWEN, {"image_mean": ["a", 1, 1]}, "the field 'image_mean' is not"),
        (QWEN, {"min_pixels": True}, "the field 'min_pixels' is True"),
        (QWEN, {"max_pixels": 100}, "at least 3136 pixels, but at most 100 are allowed"),
        (QWEN, {"size": {"longest_edge": "a"}}, "preprocessor_config.json: size: the field 'longest_edge' is a"),
        ({**ONEVISION, "image_grid_pinpoints": 7}, {}, "the field 'image_grid_pinpoints' is not a list"),
        ({**ONEVISION, "image_grid_pinpoints": [[384, 100]]}, {}, r"has \[384, 100\], not a height and a width"),
        ({**ONEVISION, "image_grid_pinpoints": [[3840, 3840]]}, {}, "has no size with at most 9 tiles"),
    ],
)
def test_what_is_wrong_is_named(folder, config, preprocessor, says):
    with pytest.raises(RefusedError, match=says):
        processing.read(folder(config, preprocessor))


def test_other_models_are_no_towers(folder):
    with pytest.raises(RefusedError, match="is 'llama', not one of siglip"):
        processing.of_tower(folder({"model_type": "llama"}, {}))
