"""TensorBoard's event files, and the files of loggers that the agent follows."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.reader.scalars import EventFile
from trainer.agent.supervisor.loggers import Loggers
from trainer.agent.supervisor.numbers import Numbers

RECORDED = Path(__file__).with_name("recorded_logs").joinpath("lightning.tfevents").read_bytes()


def varint(number):
    found = b""
    while number > 127:
        number, found = number >> 7, found + bytes([number & 127 | 128])
    return found + bytes([number])


def message(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(number):  # as TensorFlow 2 writes it
    return message(8, b"\x08\x01" + message(4, struct.pack("<f", number)))


def record(data):
    return struct.pack("<QI", len(data), 0) + data + b"crc!"


def event(step, *values):
    """An event; each value is a tag and the bytes of its number, or the number."""
    parts = (
        message(
            1, message(1, tag.encode()) + (value if isinstance(value, bytes) else b"\x15" + struct.pack("<f", value))
        )
        for tag, value in values
    )
    return record(b"\x09" + bytes(8) + b"\x10" + varint(step) + message(5, b"".join(parts)))


def read(data):
    return [(each.step, each.loss) for each in EventFile().feed(data)]


@given(st.integers(1, 5000))
def test_lightnings_file_is_read_in_parts_of_any_size(size):
    file = EventFile(rank=0)
    found = [each for at in range(0, len(RECORDED), size) for each in file.feed(RECORDED[at : at + size])]
    assert [each.step for each in found] == list(range(60))
    assert (round(found[0].loss, 4), round(found[-1].loss, 4)) == (0.2131, 0.0366)
    assert {(each.rank, each.source) for each in found} == {(0, "tensorboard")}


def test_values_of_one_event_are_one_reading_and_other_tags_none():
    values = (("train/loss", 2.5), ("train/learning_rate", 0.5), ("eval/loss", 3.5), ("aux_loss", 9.0), ("epoch", 1.0))
    (found,) = EventFile().feed(event(300, *values))
    assert (found.step, found.loss, found.lr, found.eval_loss) == (300, 2.5, 0.5, 3.5)
    assert read(event(1, ("aux_loss", 9.0)) + event(2, ("text", message(8, b"\x08\x07")))) == []


def test_tensors_of_tensorflow_2_are_read():
    assert read(event(7, ("loss", tensor(1.5)))) == [(7, 1.5)]


def test_the_mean_of_an_epoch_does_not_replace_the_steps():
    steps = (
        event(9, ("train_loss_step", 2.0)) + event(9, ("train_loss_epoch", 5.0)) + event(19, ("train_loss_step", 1.0))
    )
    assert read(steps) == [(9, 2.0), (19, 1.0)]


def test_records_without_scalars_are_skipped_and_damage_is_no_number():
    image = record(bytes(100_000))
    data = event(1, ("loss", 2.0)) + image + event(2, ("loss", 1.0))
    file = EventFile()
    assert [each.step for at in range(0, len(data), 999) for each in file.feed(data[at : at + 999])] == [1, 2]
    assert read(record(b"\x10" + b"\xff" * 20)) == []
    assert read(record(b"\x2a\xff\xff\xff")) == []


@given(st.binary(max_size=300))
def test_any_bytes_are_read(data):
    EventFile().feed(data)
    EventFile().feed(record(data))


@pytest.fixture
def plan(tmp_path):
    from trainer.agent.contract.plan import Plan
    from trainer.agent.run_files import NodePlan

    return NodePlan(Plan("r", "n", ("x",), {}), tmp_path, tmp_path / "plan")


def test_only_new_event_files_of_rank_0_count(plan, tmp_path):
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    old, other, ours = (folder / f"events.out.tfevents.1795706841.node01.{each}.0" for each in (11, 22, 33))
    old.write_bytes(event(1, ("loss", 9.0)))
    loggers = Loggers(plan)
    other.write_bytes(event(1, ("loss", 8.0)))
    ours.write_bytes(event(1, ("loss", 2.0)) + event(2, ("loss", 1.0))[:20])
    loggers.look([11, 33])
    assert [each.loss for each in loggers.readings()] == [2.0]
    with ours.open("ab") as file:
        file.write(event(2, ("loss", 1.0))[20:])
    assert [each.loss for each in loggers.readings(last=True)] == [1.0]


def test_lightnings_table_is_followed_also_when_it_is_written_again(plan, tmp_path):
    folder = tmp_path / "lightning_logs"
    table = folder / "version_1" / "metrics.csv"
    for each in (0, 1):
        (folder / f"version_{each}").mkdir(parents=True)
    (folder / "version_0" / "metrics.csv").write_text("epoch,step,train_loss\n0,9,5.0\n")
    loggers = Loggers(plan)
    table.write_text("epoch,step,train_loss\n0,0,2.5\n0,1,2.0\n")
    loggers.look([])
    assert [(each.step, each.loss) for each in loggers.readings()] == [(0, 2.5), (1, 2.0)]
    table.write_text("epoch,step,train_loss,lr\n0,0,2.5,\n0,1,2.0,\n0,2,1.5,0.1\n")
    assert [(each.step, each.loss, each.lr) for each in loggers.readings()] == [(2, 1.5, 0.1)]


@pytest.mark.parametrize(
    "folder", ["lightning_logs/version_1", "out/lightning_logs/version_1", "logs/my_model/version_1", "out", ""]
)
def test_tables_are_found_in_the_usual_folders_of_a_bounded_search(plan, tmp_path, folder):
    loggers = Loggers(plan)
    for number in range(700):
        (tmp_path / "data" / f"part{number}").mkdir(parents=True)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "metrics.csv").write_text("epoch,step,train_loss\n0,9,5.0\n")
    (tmp_path / "broken").symlink_to("broken")
    loggers.look([])
    assert [each.step for each in loggers.readings()] == [9]
    loggers.look([], last=True)
    assert loggers.readings() == []


def test_losses_in_the_output_replace_those_of_loggers():
    seen = []
    numbers = Numbers(lambda _, reading: seen.append(reading.step))
    numbers.logged(EventFile(rank=0).feed(event(19, ("loss", 2.0))))
    assert numbers.take() == [{"step": 19, "loss": 2.0}]
    assert seen == []  # the watch does not see what may be minutes late
    numbers.feed("out", 0, b"epoch 2 loss 1.75\n")  # of an epoch
    assert numbers.take() == []
    numbers.feed("out", 0, b"step 20 loss 1.5\n")
    numbers.logged(EventFile(rank=0).feed(event(29, ("loss", 1.0))))
    assert numbers.take() == [{"step": 20, "loss": 1.5}]
