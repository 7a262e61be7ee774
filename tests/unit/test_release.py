"""What makes a node refuse a release, and what a deploy has to do where it is accepted."""

from pathlib import Path, PurePosixPath

import pytest

from provision.env import release
from provision.env.manifest import Entry, Manifest, PrefixFiles
from provision.env.release import NodeFacts
from provision.errors import ClusterctlError
from provision.model import Inventory, Node

GOOD = NodeFacts(
    machine="x86_64",
    glibc="2.36",
    user="trainer",
    tools=frozenset({"tar", "sha256sum"}),
    base="/opt",
    writable=True,
    free_bytes=10_000_000_000,
    free_inodes=1_000_000,
)


@pytest.fixture
def inventory():
    return Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), (Node("node01", "10.0.0.1"),))


@pytest.fixture
def manifest():
    return Manifest(
        name="llm",
        tool="0.1.0",
        created="2026-11-21T08:00:00Z",
        platform="linux-64",
        python="3.11.7",
        source_prefix="/envs/llm",
        chunks=(),
        prefix_files=PrefixFiles(0, 0, 0, "", ""),
        files=(
            Entry("bin/torchrun", "file", 0o755, 0, 1_000_000_000, "a" * 64),
            Entry("lib", "dir", 0o755, 0),
        ),
        relocations=(("/envs/llm", ""),),
        glibc="2.28",
        versions={"torch": "2.13.0", "deepspeed": None},
    )


def test_a_good_node_takes_it(inventory, manifest):
    assert release.judge(GOOD, inventory, manifest) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": frozenset()}, "tar is missing"),
        ({"machine": "aarch64"}, "is linux-aarch64, the bundle was packed for linux-64"),
        ({"machine": "riscv64"}, "is linux-riscv64"),
        ({"glibc": "2.27"}, "has glibc 2.27, the environment needs 2.28"),
        ({"glibc": "2.9"}, "has glibc 2.9"),
        ({"prefix_other": True}, "/opt/llm/current exists and is not clusterctl's"),
        ({"prefix_link": "/home/somebody/env"}, "is a link to /home/somebody/env"),
        ({"prefix_link": "releases-of-mine/x"}, "is a link to releases-of-mine/x"),
        ({"releases_foreign": True}, "/opt/llm/releases exists and is not clusterctl's"),
        ({"writable": False}, "install -d -o trainer /opt/llm"),
        ({"free_bytes": 1_010_000_000}, "1.01 GB free at /opt, the environment needs 1.02 GB"),
        ({"free_inodes": 1}, "1 inodes free at /opt"),
    ],
)
def test_a_bad_node_is_refused_with_the_reason(inventory, manifest, change, message):
    from dataclasses import replace

    assert message in (release.judge(replace(GOOD, **change), inventory, manifest) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"free_bytes": 0, "release": "unpacked"},  # it is there already
        {"free_bytes": None, "free_inodes": None},  # the node could not say
        {"glibc": ""},
        {"prefix_link": "releases/0123456789ab"},
        {"prefix_link": "/opt/llm/releases/0123456789ab"},
        {"glibc": "2.100"},
    ],
)
def test_what_is_no_reason_to_refuse(inventory, manifest, change):
    from dataclasses import replace

    assert release.judge(replace(GOOD, **change), inventory, manifest) is None


def test_current_means_complete_and_linked(inventory, manifest):
    linked = f"releases/{manifest.release_id}"
    assert release.is_current(NodeFacts(release="complete", prefix_link=linked), inventory, manifest)
    assert not release.is_current(NodeFacts(release="unpacked", prefix_link=linked), inventory, manifest)
    assert not release.is_current(NodeFacts(release="complete", prefix_link="releases/else"), inventory, manifest)


def test_describe_says_what_each_node_lacks(inventory, manifest):
    linked = f"releases/{manifest.release_id}"
    facts = {
        "a": NodeFacts(release="complete", prefix_link=linked),
        "b": NodeFacts(release="complete"),
        "c": NodeFacts(release="unpacked"),
        "d": NodeFacts(),
    }
    expected = {"a": "unchanged", "b": "switch", "c": "test and switch", "d": "send"}
    assert release.describe(facts, inventory, manifest) == expected


def test_an_answer_that_was_cut_off_is_noticed():
    with pytest.raises(ClusterctlError, match="incomplete"):
        release.read_facts("fact machine=x86_64\nfact glibc=glibc 2.36\n")


def test_only_what_was_packed_is_tried(inventory, manifest):
    _, activate = release.steps(inventory, manifest)
    smoke = activate[0].do
    assert "import sys, torch'" in smoke
    assert "deepspeed" not in smoke
    assert "bin/torchrun --help" in smoke
