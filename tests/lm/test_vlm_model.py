"""Vision-language models compute what transformers' models compute, and are exchanged with them as folders."""

import json
import shutil

import pytest
from trainings import HERE
from vlm_models_cases import CASES, COMPOSED

QWEN, LLAVA, CLIP = "qwen2.5-vl", "siglip and qwen2", "clip and llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vlm")


@pytest.fixture(scope="module")
def found(gpt, folder):
    result = gpt.run(HERE / "vlm_models.py", folder)
    assert result.returncode == 0, result.stderr
    return {row["case"]: row for row in map(json.loads, result.stdout.splitlines()) if "case" in row}


@pytest.mark.parametrize("case", [*CASES, *COMPOSED])
def test_transformers_computes_the_same_logits_and_reads_every_parameter(found, case):
    row = found[case]
    assert row["problems"] == []
    assert max(row["logits"], row.get("exported", 0)) < 1e-5, row


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers_with_packed_documents_too(found, case):
    row = found[case]
    assert max(row["loss"], row["packed"]) < 1e-5, row
    assert max(row["gradient"], row["packed_gradient"], row["selective"], row["full"]) < 1e-4, row


@pytest.mark.parametrize("case", CASES)
def test_a_batch_without_images_gives_the_tower_gradients_of_zero(found, case):
    row = found[case]
    assert row["without images"] is True
    assert row["text"] < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_a_shape_is_read_again_from_a_checkpoint_and_from_an_exported_folder(found, case):
    assert [found[case][key] for key in ("record", "read", "parameters")] == [True, True, True]


@pytest.mark.parametrize("case", CASES)
def test_operations_of_a_patch_are_those_that_torch_counts(found, case):
    row = found[case]
    # torch counts no biases, and the class tokens of CLIP too: here 3 beside 16 patches.
    assert 0.95 < row["flops"] < (1.2 if "clip" in case else 1.0)
    layers = {"siglip and qwen2": 3, QWEN: 1 + 2 * 16 / 1600}.get(case, 2)
    assert row["attention"] == pytest.approx(layers * 1600)


@pytest.mark.parametrize("case", CASES)
def test_peft_reads_adapters_of_the_decoder_and_none_of_the_tower(found, case):
    row = found[case]
    assert row["unlike"] == []
    assert row["adapters"] == 2 * 2 * 7  # A and B of seven matrices in two layers
    assert row["adapter"] < 1e-5


@pytest.mark.parametrize("case", COMPOSED)
def test_a_composed_model_keeps_both_parts_and_draws_the_rest_from_the_seed(found, case):
    row = found[case]
    assert max(row["text"], row["tower"]) < 1e-5
    assert row["seeds"] == [True, False]


@pytest.mark.parametrize("case", COMPOSED)
def test_transformers_reads_how_a_composed_model_sees_images(found, case):
    assert found[case]["images"] == [28, 8, 0.1, 0.2, 0.3]  # 8 pairs of rows and columns have at most 4 tiles


ENGINES = ("plain", "fsdp", "zero3")


@pytest.fixture(scope="module")
def trained(gpt):
    """Losses and norms by case, engine and number of ranks."""
    rows = {}
    for ranks, engines in ((1, ENGINES[:1]), (2, ENGINES)):
        result = gpt.run(HERE / "vlm_engines.py", *engines, ranks=ranks)
        assert result.returncode == 0, result.stderr
        for row in map(json.loads, (line for line in result.stdout.splitlines() if line.startswith("{"))):
            if "compiled" in row:
                rows[row["case"], "compiled", ranks] = row["compiled"]
            else:
                rows[row["case"], row["engine"], ranks] = row["losses"] + row["norms"]
    return rows


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_alike_although_only_one_rank_has_an_image(trained, engine):
    cases = {case for case, _, _ in trained}
    assert len(cases) == 2
    for case in cases:
        assert trained[case, engine, 2] == pytest.approx(trained[case, "plain", 1], rel=1e-5)


@pytest.mark.parametrize("case", ["clip and llama", "qwen2.5-vl"])
def test_the_tower_is_compiled_once_for_batches_with_and_without_images(trained, case):
    assert trained[case, "compiled", 1] == [True, True]


REFUSED = {  # a case, what config.json says instead, and what the line says
    "type": (LLAVA, {"model_type": "llava"}, "a model of type llava; known are llava_onevision, qwen2_5_vl"),
    "tower": (LLAVA, {"vision_config": {"model_type": "dinov2"}}, "a tower of type dinov2; known are siglip"),
    "layer": (LLAVA, {"vision_feature_layer": -9}, "vision_feature_layer -9 is no layer of a tower with 3"),
    "layers": (LLAVA, {"vision_feature_layer": [1, 2]}, "vision_feature_layer [1, 2] is no layer"),
    "strategy": (CLIP, {"vision_feature_select_strategy": "full"}, "select_strategy full with a tower of clip"),
    "token": (QWEN, {"image_token_id": 300}, "image_token_id 300 is no token of 300"),
    "pinpoints": (LLAVA, {"image_grid_pinpoints": [[28, 30]]}, "image_grid_pinpoints has [28, 30]"),
    "aspect": (LLAVA, {"vision_aspect_ratio": "square"}, "vision_aspect_ratio square"),
    "huge": (LLAVA, {"vision_config": {"hidden_size": 1 << 40}}, "hidden_size 1099511627776 must be at least 1"),
    "heads": (QWEN, {"vision_config": {"num_heads": 3}}, "hidden_size 32 is not 3 heads"),
    "window": (QWEN, {"vision_config": {"window_size": 30}}, "window_size 30 must be a multiple of 14"),
    "whole": (QWEN, {"vision_config": {"fullatt_block_indexes": [3]}}, "fullatt_block_indexes [3]"),
    "out": (QWEN, {"vision_config": {"out_hidden_size": 32}}, "out_hidden_size 32 is not hidden_size 64"),
    "sections": (
        QWEN,
        {"text_config": {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [2, 3, 4]}}},
        "mrope_section [2, 3, 4] is no three parts of the 8 pairs",
    ),
    "no tower": (LLAVA, {"vision_config": None}, "has no vision_config"),
    "width": (LLAVA, {"vision_config": {"intermediate_size": 64}}, "is [48, 32], config.json says [64, 32]"),
    "projector": (LLAVA, {"text_config": {"intermediate_size": 96}}, "config.json says [96, 64]"),
}


@pytest.fixture(scope="module")
def refused(gpt, folder, found):
    """Each folder that is wrong, and the line that refuses it."""
    assert found
    for name, (case, wrong, _) in REFUSED.items():
        shutil.copytree(folder / case / "theirs", folder / "wrong" / name)
        path = folder / "wrong" / name / "config.json"
        config = json.loads(path.read_text())
        for key, value in wrong.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(config))
    shards = folder / "wrong" / "shard"
    shutil.copytree(folder / QWEN / "theirs", shards)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "second.safetensors"}}))
    shutil.copytree(folder / QWEN / "theirs", folder / "wrong" / "gone")
    (folder / "wrong" / "gone" / "model.safetensors").unlink()
    result = gpt.run(HERE / "vlm_refused.py", folder / "wrong")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_no_known_model_is_refused_in_a_line(refused, name):
    assert REFUSED[name][2] in refused[name]
    assert "\n" not in refused[name]


def test_missing_weights_are_refused_in_a_line(refused):
    assert "names 1 files, but second.safetensors is missing" in refused["shard"]
    assert "contains no weights" in refused["gone"]


def test_a_gpt2_decoder_and_a_token_outside_the_vocabulary_cannot_be_composed(refused):
    assert "a decoder of type gpt2 cannot be part of a llava_onevision model" in refused["compose gpt2"]
    assert "the new token <image> would be number 300" in refused["compose token"]
