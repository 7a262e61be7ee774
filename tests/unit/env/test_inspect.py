"""The output of ``clusterctl inspect``."""

import json
import re
from dataclasses import replace

import pytest

from provision.env import overview
from provision.env.bundle.manifest import Chunk, Entry, Manifest, Mark, Package, PrefixFiles
from provision.env.overview import Overview, overview_data, overview_text
from provision.env.packing.pack import pack
from provision.env.text import columns, line, number, size
from provision.errors import BundleError
from provision.model import Progress, ignore
from provision.summaries.bundles import inspection_output
from provision.tasks.bundles import inspect

HEX = "0" * 64


def chunk(package, size=1000, key="1"):
    return Chunk(HEX, key * 64, "tar", package, size, size // 2, 0)


def file(path, size, *, chunk=0, marks=()):
    return Entry(path, "file", 0o644, 0, size, HEX, chunks=() if marks else (chunk,), marks=marks)


def manifest(**changes):
    """An environment with CUDA, as its manifest would have it."""
    known = {
        "name": "llm",
        "tool": "0.1.0",
        "created": "2026-01-02T03:04:05Z",
        "platform": "linux-64",
        "python": "3.11.7",
        "source_prefix": "/opt/conda/envs/llm",
        "chunks": (chunk("torch"), chunk("numpy", key="2"), chunk("lib/", key="3"), chunk("./", key="4")),
        "prefix_files": PrefixFiles(HEX, 3000, 900, 0),
        "files": (
            file("bin/torchrun", 200, marks=(Mark("shebang"),)),
            file("lib/a.so", 5000, chunk=0),
            file("lib/b.py", 3000, chunk=1),
            file("lib/c.so", 10, marks=(Mark("binary", "", 255), Mark("text"))),
            file("lib/d.so", 20, marks=(Mark("binary"),)),
            file("lib/e", 7, chunk=2),
            Entry("lib/link", "link", 0o777, 0, target="/opt/conda/envs/llm/x", marks=(Mark("link"),)),
        ),
        "relocations": (("/root/LLaMA-Factory", "src/LLaMA-Factory"), ("/alias/llm", ""), ("/opt/conda/envs/llm", "")),
        "packages": (
            Package("llamafactory", "0.9.5", "editable"),
            Package("numpy", "2.4.6", "conda"),
            Package("torch", "2.11.0", "pypi"),
            Package("transformers", "5.6.0", "pypi"),
        ),
        "glibc": "2.28",
        "versions": {"torch": "2.11.0", "deepspeed": None, "llamafactory": "0.9.5", "cuda": "13.0", "nccl": "2.28.9"},
        "gpu_architectures": ("sm_100", "sm_80", "sm_90", "sm_999"),
        "notices": ("share/x links to /data, outside the environment: the nodes must have it",),
    }
    return Manifest(**known | changes)


def test_overview_shows_what_users_ask_before_they_carry_a_bundle():
    text = overview_text(Overview(manifest(), 4_000))
    for reported in (
        "llm: release ",
        "2026-01-02T03:04:05Z by clusterctl 0.1.0, format 3",
        "linux-64, glibc 2.28 or later; Python 3.11.7",
        "torch 2.11.0, llamafactory 0.9.5, transformers 5.6.0, cuda 13.0, nccl 2.28.9",
        "sm_80   A100, A800, A30",
        "sm_90   H100, H800, H200, H20, GH200",
        "sm_999  not in this version's table",
        "4.0 kB packed in 4 chunks, 8.2 kB unpacked",
        "4 (1 conda, 2 pypi, 1 editable)",
        "/root/LLaMA-Factory is packed as src/LLaMA-Factory",
        "/opt/conda/envs/llm",
        "lib/d.so: a prefix of up to 19 bytes fits",
        "lib/c.so: a prefix of up to 255 bytes fits",
        "1 script by its first line, 1 text file, 2 binaries, 1 symlink",
        "/alias/llm",
        "outside the environment",
    ):
        assert reported in " ".join(text.split()) or reported in text, reported
    assert text.index("sm_90") < text.index("sm_100")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_packages_come_with_their_size_and_the_largest_first():
    overview = Overview(manifest(), 1)
    assert [(weight.name, weight.size, weight.compressed) for weight in overview.weights] == [
        ("torch", 5000, 500),
        ("numpy", 3000, 500),
        ("lib/", 7, 500),
    ]
    assert [weight.name for weight in overview.unowned] == ["lib/"]
    lines = overview_text(overview).splitlines()
    rows = [row.split() for row in lines if re.search(r"\b(torch|numpy)\b.*kB", row)]
    assert rows == [["torch", "2.11.0", "5.0", "kB"], ["numpy", "2.4.6", "3.0", "kB"]]


def test_added_data_are_distinguished_from_files_that_no_package_owns():
    chunks = (chunk("data/set/"), chunk("data/", key="2"), chunk("data/model.bin/", key="3"))
    files = (file("data/a", 5), file("data/model.bin", 9000, chunk=2), file("data/set/x", 700))
    files = (replace(files[0], chunks=(1,)), files[1], files[2])
    overview = Overview(manifest(chunks=chunks, files=files), 1)
    assert [weight.name for weight in overview.data] == ["data/model.bin/", "data/set/"]
    assert [weight.name for weight in overview.unowned] == ["data/"]
    assert "data           data/model.bin/  9.0 kB\n               data/set/        700 B" in overview_text(overview)


def test_only_the_largest_packages_are_listed_by_default():
    many = tuple(Package(f"p{number:02}", "1", "pypi") for number in range(30))
    overview = Overview(manifest(packages=many), 1)
    assert "and 20 more (--packages)" in overview_text(overview)
    full = overview_text(overview, packages=True)
    assert "more (--packages)" not in full
    assert all(package.name in full for package in many)


def test_files_and_prefix_files_are_listed_on_request():
    overview = Overview(manifest(), 1)
    assert "lib/b.py" not in overview_text(overview)
    assert "644  3.0 kB  lib/b.py" in overview_text(overview, files=True)
    assert "binary text  lib/c.so" in overview_text(overview, prefix=True)


def test_json_has_all_fields():
    data = json.loads(json.dumps(overview_data(Overview(manifest(), 4_000))))
    assert data["gpu_architectures"]["sm_80"] == "A100, A800, A30"
    assert data["bytes"] == 4_000
    assert data["prefix_counts"] == {"shebang": 1, "text": 1, "binary": 2, "link": 1}
    assert {"path": "lib/d.so", "kinds": ["binary"], "room": 19} in data["prefix"]
    assert data["packages"][1] == {
        "name": "numpy",
        "version": "2.4.6",
        "kind": "conda",
        "files": 1,
        "bytes": 3000,
        "compressed_bytes": 500,
    }
    assert data["checkouts"] == [{"source": "/root/LLaMA-Factory", "path": "src/LLaMA-Factory"}]
    assert len(data["files"]) == 7
    assert data["versions"]["transformers"] == "5.6.0"


def test_missing_cuda_is_reported_and_without_torch_no_cards_are_listed():
    cpu = manifest(gpu_architectures=None, versions={"torch": "2.13.0", "cuda": None})
    assert "torch is built without CUDA" in overview_text(Overview(cpu, 1))
    bare = manifest(gpu_architectures=None, versions={}, packages=())
    text = overview_text(Overview(bare, 1))
    assert "GPUs" not in text
    assert "no torch and no training library" in text


def test_long_paths_are_not_cut():
    path = "lib/" + "very-" * 30 + "long.so"
    text = overview_text(Overview(manifest(files=(file(path, 1, marks=(Mark("binary"),)),)), 1))
    assert path in text


@pytest.mark.parametrize(
    ("architecture", "cards"),
    [("sm_80", "A100"), ("sm_90a", "H100"), ("sm_90", "H800"), ("sm_100f", "B200"), ("compute_90", ""), ("sm_1", "")],
)
def test_architectures_have_the_names_on_the_cards(architecture, cards):
    assert cards in overview.cards(architecture)
    assert bool(overview.cards(architecture)) == bool(cards)


def test_a_packed_environment_is_described_completely_and_verified(packed):
    events = []
    inspection = inspect(packed, verify=True, emit=events.append)
    assert inspection.verified
    assert any(isinstance(event, Progress) for event in events)
    overview = inspection.overview
    assert overview.stored == packed.stat().st_size
    assert sum(weight.size for weight in overview.weights) + overview.prefix_size == overview.unpacked
    assert overview.kinds["hard"] == sum(entry.type == "hard" for entry in overview.manifest.files)
    assert overview.needed > overview.unpacked
    data, text = inspection_output(inspection, packages=True, files=True, prefix=True)
    text = " ".join(text.split())  # where lines end depends on the length of the checkout's path
    assert "every byte matches the manifest" in text
    assert "is packed as src/proj" in text
    assert json.loads(json.dumps(data))["verified"] is True
    assert data["bundle"] == str(packed)


def test_damage_is_found_with_verify_only(packed):
    from provision.env.bundle.reader import open_bundle

    data = bytearray(packed.read_bytes())
    data[open_bundle(packed).manifest.chunks[0].offset + 5] ^= 1
    packed.write_bytes(data)
    inspect(packed, emit=ignore)
    with pytest.raises(BundleError, match="damaged"):
        inspect(packed, verify=True, emit=ignore)


def test_environment_without_packages_is_described(tmp_path, helpers):
    prefix = tmp_path / "bare"
    helpers.write(prefix / "bin/python", "#!/bin/sh\n", 0o755)
    helpers.write(prefix / "conda-meta/history", "")
    pack(prefix, tmp_path / "bare.ccb", name="bare", emit=ignore)
    text = overview_text(inspect(tmp_path / "bare.ccb", emit=ignore).overview, packages=True)
    assert "no file contains it" in text
    assert "packages       none" in text


def test_words():
    assert size(999) == "999 B"
    assert size(1_000_000) == "1.0 MB"
    assert size(2_345_000_000) == "2.35 GB"
    assert (number(1, "file"), number(3838, "file"), number(2, "binary", "binaries")) == (
        "1 file",
        "3,838 files",
        "2 binaries",
    )
    assert line("label") == []
    assert line("label", "a " * 60)[1].startswith(" " * 17 + "a")
    assert columns([("a", "b"), ("ccc", "d")]) == ["a    b", "ccc  d"]
    assert columns([]) == []
