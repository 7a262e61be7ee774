"""Images as a vision-language model sees them: pixels and tokens of transformers, rows, and what is refused."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    done = forks.run(HERE / "vlm_data.py", folder, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line.pop("name"): line for line in lines}


@pytest.mark.parametrize("model", ["qwen", "onevision"])
def test_tokens_and_pixels_are_those_of_transformers(found, model):
    """The patches of Qwen2.5-VL are in the order of its windows, and its tokens have positions in three dimensions."""
    same = found[f"compared {model}"]
    assert same["samples"] == same["ids"] == same["masks"] >= 30
    assert same["images"] == same["pixels"] == same["places"] == same["ends"] == same["features"] >= 20
    assert same["positions"] == (same["samples"] if model == "qwen" else 0)


@pytest.mark.parametrize("model", ["qwen", "onevision"])
def test_every_batch_has_the_same_sizes(found, model):
    assert found[f"compared {model}"]["shapes"] == 1


def test_every_format_of_records_has_the_same_batch(found):
    assert len(found["formats"]["same"]) == 10
    assert found["folder"]["same"]


def test_data_in_another_folder_is_the_same_data(found):
    assert found["moved"] == {"same": True, "root": "moved"}


@pytest.mark.parametrize("name", ["qwen", "onevision"])
def test_packed_samples_from_files_have_the_losses_of_transformers(found, name):
    losses = found[f"losses {name}"]
    assert losses["images"] > 2
    assert losses["apart"] < 1e-5


def test_a_decoder_without_an_image_token_gets_one(found):
    """The whole image of 97 x 31 pixels, and 8 of the 14 rows of features of 2 x 4 tiles: the others are padding."""
    composed = found["composed"]
    assert composed["text"].startswith("<|im_start|>user\n\nwhat is it<|im_end|>\n<|im_start|>assistant\nthe sea")
    assert composed["token"] == 0
    assert composed["images"] == 49 + 8 * (28 + 1) <= composed["of_images"]


def test_the_image_token_is_the_tokenizers_own_or_the_next(found):
    tokens = found["tokens"]
    assert (tokens["own"], tokens["next"], tokens["same"]) == ("<image>", "<image>", True)
    assert "tokenizer.json has no such token" in tokens["refused"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty.jpg", "bad/empty.jpg cannot be read: it is empty"),
        ("truncated.jpg", "bad/truncated.jpg cannot be read: the file is truncated"),
        ("large.jpg", "bad/large.jpg cannot be read: the file is truncated"),
        ("small.jpg", "bad/small.jpg cannot be read: the file is truncated"),
        ("truncated.png", "bad/truncated.png cannot be read: Truncated"),
        ("text.png", "bad/text.png cannot be read: its format is none of JPEG, PNG"),
        ("bomb.png", "bad/bomb.png cannot be read: it has 50000 x 50000 pixels, more than 100 million"),
        ("thin.png", "bad/thin.png cannot be read: it has 1 x 5000 pixels: one side is over 200 times the other"),
        ("pipe.png", "bad/pipe.png cannot be read: it is not a file"),
        ("missing.png", "bad/missing.png cannot be read: No such file"),
        (("../" * 30 + "etc/passwd")[:40], "etc/passwd cannot be read: its format is none of"),
        ("x\0y", "is not a path"),
        ("n" * 40, "is not a path"),
        ("http://example.com/a.png", "http://example.com/a.png is on another machine"),
        ("data:image/png,abc", "URL is not base64"),
        ("data:image/png;base64,???", "URL is not base64"),
        ("middle.jpg", "bad/middle.jpg cannot be read: "),
        ("floats.tiff", "bad/floats.tiff cannot be read: its pixels are fractions"),
        ("fewer", "the texts have <image> 2 times, but the number of images in the field 'images' is 1"),
        ("more", "the texts have <image> 1 times, but the number of images in the field 'images' is 2"),
        ("none", "the texts have <image> 1 times, but the number of images in the field 'images' is 0"),
    ],
)
def test_a_wrong_image_is_refused_with_file_line_and_image(found, name, says):
    message = found["refused"][name]
    assert "records.jsonl: line 2: " in message
    assert says in message


def test_a_wrong_record_is_refused(found):
    messages = found["refused"]
    assert "parquet.parquet: row 1: an image of 10 bytes cannot be read" in messages["bytes"]
    assert "records.jsonl: line 1: an image is neither a path nor bytes" in messages["number"]
    assert "makes 2 image tokens (<|image_pad|>) of 1 images" in messages["token"]
    assert "has an image in an answer" in messages["answer"]
    assert not messages["header"]  # damage that only decoding finds


def test_wrong_images_are_skipped_and_counted(found):
    notes = found["skipped"]["notes"]
    assert any("2 samples" in note for note in notes)
    assert any("1 records skipped" in note and "line 2: the image bad/empty.jpg" in note for note in notes)


def test_unusual_images_are_read(found):
    assert len(found["unusual"]) == 11
    assert all(found["unusual"].values()), found["unusual"]


def test_an_image_that_breaks_while_training_is_named(found):
    messages = found["late"]
    assert "gone.jpg cannot be read: No such file" in messages["gone"]
    assert "torn.jpg cannot be read: image file is truncated" in messages["torn"]
    assert "changed.jpg cannot be read: it has 31 x 31 pixels, and had 300 x 200 before" in messages["changed"]


def test_a_long_sample_ends_before_an_image_that_does_not_fit(found):
    """The first has 97 x 31 pixels, which are 32 patches. The second has more tokens and patches than are left."""
    for name in ("cut", "narrow"):
        assert found[name]["patches"] == [32] * 3
        assert len(set(found[name]["tokens"])) == 1
    assert any("3 of 3 samples are longer" in note for note in found["cut"]["notes"])


def test_a_batch_without_images_is_padding_in_short_pieces(found):
    assert found["text"] == {"images": 0, "ends": [0, 64, 128, 128]}


def test_little_of_a_row_is_padding(found):
    assert found["padding"]["rows"] > 100
    assert found["padding"]["tokens"] <= 0.02  # of few rows, the last of them half empty
    assert found["padding"]["patches"] <= 0.15
    assert "% of them padding" in found["padding"]["report"]


def test_the_trainer_holds_the_data_with_its_evaluations(found):
    held = found["held"]
    assert held["steps"] == -(-held["rows"] // 2)
    assert held["shapes"][0] == held["shapes"][1]
    assert held["images"] > 0
    assert 0 < held["padding"] < 0.2
    assert "patches in each row" in held["notes"][-1]


def test_rows_are_the_same_on_every_number_of_ranks(found):
    ranks = found["ranks"]
    assert ranks["equal"]
    assert ranks["pixels"][0] == pytest.approx(ranks["pixels"][1], abs=1e-6)
    assert ranks["counts"] == [ranks["counts"][0], *[ranks["counts"][0] / 2] * 2]
