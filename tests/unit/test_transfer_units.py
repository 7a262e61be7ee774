"""Parts to units and back: no byte is lost at any size, and nothing is sent that every node has."""

from __future__ import annotations

import hashlib
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from provision.errors import BundleError, ClusterctlError
from provision.model import Part
from provision.transfer.chain import KEYS, batches, units

UNIT = 64


def part(key, data, block=10, **options):
    parts = [data[at : at + block] for at in range(0, len(data), block)]
    return Part(key, options.pop("kind", "tar"), len(data), lambda: iter(parts), **options)


def stream(parts, lacking, kept, digest="sha256sum"):
    """All units of a lane."""
    number, found = 1, []
    for batch in batches(parts, lacking, unit=UNIT):
        found += units(batch, kept, digest, number, unit=UNIT)
        number = found[-1].number + 1
    return found


def field(unit, index):
    return unit.header.decode().split(" ")[index].rstrip("\n")


sizes = st.lists(st.integers(1, 3 * UNIT + 1), min_size=1, max_size=12)


@given(sizes, st.integers(1, 3 * UNIT), st.data())
@settings(deadline=None)
def test_every_node_gets_its_missing_bytes_in_order(lengths, block, data):
    contents = {f"k{n}": bytes([n]) * length for n, length in enumerate(lengths)}
    parts = [part(key, content, block) for key, content in contents.items()]
    lacking = [data.draw(st.sets(st.sampled_from(sorted(contents)))) for _ in range(3)]
    found = stream(parts, lacking, [(), (), ()])
    assert [unit.number for unit in found] == list(range(1, len(found) + 1))
    for place, keys in enumerate(lacking):
        mine = [unit for unit in found if unit.mask[place] == "n"]
        assert b"".join(b"".join(unit.data) for unit in mine) == b"".join(contents[k] for k in contents if k in keys)
        named = [key for unit in mine if unit.last for key in field(unit, 7).split(",")]
        assert named == [key for key in contents if key in keys]
    for unit in found:
        assert unit.size == sum(map(len, unit.data)) == int(field(unit, 3)) <= UNIT
        assert field(unit, 4) == hashlib.sha256(b"".join(unit.data)).hexdigest()
        assert "n" in unit.mask


def test_small_tar_parts_missing_on_the_same_nodes_share_a_unit():
    parts = [part(f"k{n}", b"x" * 20) for n in range(5)]
    lacking = [{"k0", "k1", "k2", "k3", "k4"}, {"k0", "k1", "k2", "k4"}]
    assert [field(unit, 7) for unit in stream(parts, lacking, [(), ()])] == ["k0,k1,k2", "k3", "k4"]


def test_ranges_and_very_many_parts_do_not_share_a_unit():
    parts = [part("a", b"x"), part("b", b"x", kind="range", path="f"), part("c", b"x")]
    assert [field(unit, 7) for unit in stream(parts, [{"a", "b", "c"}], [()])] == ["a", "b", "c"]
    many = [part(f"k{n}", b"") for n in range(KEYS + 1)]
    assert [len(batch.parts) for batch in batches(many, [{each.key for each in many}])] == [KEYS, 1]


def test_kept_units_are_not_sent():
    parts = [part("a", bytes(range(100)))]
    first, second = stream(parts, [{"a"}], [()])
    sums = [field(unit, 4) for unit in (first, second)]
    kept = stream(parts, [{"a"}, {"a"}, set()], [{sums[0]}, set(), set()])
    assert [unit.mask for unit in kept] == ["sn-", "nn-"]
    assert next(unit.data for unit in kept) == ()  # the first node has it, and hands it on
    others = stream(parts, [set(), {"a"}], [set(), {sums[1]}])
    assert [(unit.mask, bool(unit.data)) for unit in others] == [("-n", True), ("-s", False)]


def test_nodes_that_pass_a_unit():
    (unit, _) = stream([part("a", bytes(range(100)))], [set(), {"a"}, set()], [(), (), ()])
    assert [unit.passes(place) for place in range(3)] == [True, True, False]


def test_last_unit_of_a_part_is_sent_after_its_verification():
    def damaged():
        yield b"x" * (2 * UNIT)
        raise BundleError("damaged")

    found = []
    (batch,) = batches([Part("a", "tar", 2 * UNIT, damaged)], [{"a"}], unit=UNIT)
    with pytest.raises(BundleError):
        found.extend(units(batch, [()], "b2sum", 1, unit=UNIT))
    for unit in found:
        assert not unit.last


def test_part_of_another_size_is_an_error():
    (batch,) = batches([Part("a", "tar", 3, lambda: iter([b"four"]), path="f")], [{"a"}])
    with pytest.raises(ClusterctlError, match="f has 4 bytes where 3 were announced"):
        list(units(batch, [()], "b2sum", 1))


@pytest.mark.parametrize("digest", ["b2sum", "sha256sum"])
def test_digest_matches_the_program_of_the_node(digest):
    (unit,) = stream([part("a", b"abc")], [{"a"}], [()], digest)
    argv = {"b2sum": ["b2sum", "-l", "256"], "sha256sum": ["sha256sum"]}[digest]
    done = subprocess.run(argv, input=b"abc", capture_output=True, check=True)
    assert field(unit, 4) == done.stdout.split()[0].decode()


@given(st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name))
@example(b"it's\n\\x \xff%s")
@settings(deadline=None)
def test_sh_reads_a_path_back(name):
    path = name.decode("utf-8", "surrogateescape")
    (unit,) = stream([part("a", b"abc", kind="range", path=path, offset=3 << 20, mode=0o640, mtime=7)], [{"a"}], [()])
    assert unit.header.decode().split(" ")[6:11] == ["range", "a", "3", "640", "7"]
    assert unit.header.count(b"\n") == 1
    done = subprocess.run(["sh", "-c", 'printf %b "$1"', "sh", field(unit, 11)], capture_output=True, check=True)
    assert done.stdout == name
