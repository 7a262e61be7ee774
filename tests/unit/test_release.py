"""What makes a node refuse a release, what a deploy has to do where it is accepted, and which releases may go."""

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from provision.env.bundle.manifest import Entry, Manifest, PrefixFiles
from provision.env.release import catalog, examine, install
from provision.env.release.catalog import ReleasePaths, Releases
from provision.env.release.examine import NodeFacts
from provision.env.relocation import Relocated
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
        prefix_files=PrefixFiles("", 0, 0, 0),
        files=(
            Entry("bin/torchrun", "file", 0o755, 0, 1_000_000_000, "a" * 64),
            Entry("lib", "dir", 0o755, 0),
        ),
        relocations=(("/envs/llm", ""),),
        glibc="2.28",
        versions={"torch": "2.13.0", "deepspeed": None},
    )


@pytest.fixture
def places(inventory, manifest):
    return ReleasePaths.of(inventory, manifest.release_id)


def test_suitable_node_is_accepted(inventory, manifest):
    assert examine.judge(GOOD, inventory, manifest) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": frozenset()}, "tar and sha256sum are missing; install them (Debian: apt-get install tar coreutils)"),
        ({"tools": frozenset({"tar"})}, "sha256sum is missing"),
        ({"machine": "aarch64"}, "is linux-aarch64, the bundle was packed for linux-64"),
        ({"machine": "riscv64"}, "is linux-riscv64"),
        ({"glibc": "2.27"}, "has glibc 2.27, the environment needs 2.28"),
        ({"glibc": "2.9"}, "has glibc 2.9"),
        ({"prefix_other": True}, "/opt/llm/current exists and is not clusterctl's"),
        ({"prefix_link": "/home/somebody/env"}, "is a link to /home/somebody/env"),
        ({"prefix_link": "releases-of-mine/x"}, "is a link to releases-of-mine/x"),
        ({"releases_foreign": True}, "/opt/llm/releases exists and is not clusterctl's"),
        ({"writable": False}, "install -d -o trainer /opt/llm"),
        ({"noexec": True}, "/opt is mounted noexec"),
        ({"free_bytes": 1_010_000_000}, "1.01 GB free at /opt, the environment needs 1.02 GB"),
        ({"free_inodes": 1}, "1 inodes free at /opt"),
    ],
)
def test_a_bad_node_is_refused_with_the_reason(inventory, manifest, change, message):
    assert message in (examine.judge(replace(GOOD, **change), inventory, manifest) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"free_bytes": 0, "release": "unpacked"},  # it is there already
        {"free_bytes": 0, "others": 1},  # most of it is linked; what is missing is known later
        {"free_bytes": None, "free_inodes": None},  # the node could not say
        {"glibc": ""},
        {"prefix_link": "releases/0123456789ab"},
        {"prefix_link": "/opt/llm/releases/0123456789ab"},
        {"glibc": "2.100"},
    ],
)
def test_unknown_or_sufficient_values_are_no_reason_to_refuse(inventory, manifest, change):
    assert examine.judge(replace(GOOD, **change), inventory, manifest) is None


def test_current_means_complete_and_linked(places):
    assert examine.is_current(NodeFacts(release="complete", prefix_link=places.target), places)
    assert examine.is_current(NodeFacts(release="complete", prefix_link=places.release), places)
    assert not examine.is_current(NodeFacts(release="unpacked", prefix_link=places.target), places)
    assert not examine.is_current(NodeFacts(release="complete", prefix_link="releases/else"), places)


def test_action_of_each_node(places):
    facts = {
        "a": NodeFacts(release="complete", prefix_link=places.target),
        "b": NodeFacts(release="complete"),
        "c": NodeFacts(release="unpacked"),
        "d": NodeFacts(),
    }
    expected = {"a": "unchanged", "b": "switch", "c": "test and switch", "d": "send"}
    assert {name: examine.action(fact, places).value for name, fact in facts.items()} == expected
    repairs = {name: examine.action(fact, places, repair=True).value for name, fact in facts.items()}
    assert repairs == {"a": "repair", "b": "repair", "c": "repair", "d": "send"}


def test_truncated_answer_is_detected():
    with pytest.raises(ClusterctlError, match="incomplete"):
        examine.read_facts("fact machine=x86_64\nfact glibc=glibc 2.36\n")
    with pytest.raises(ClusterctlError, match="incomplete"):
        catalog.read_listing("current abc\n")
    with pytest.raises(ClusterctlError, match="incomplete"):
        catalog.verify_finding("node01", "abc", "checked 7\n")


def test_smoke_test_imports_only_packed_packages(places, manifest):
    planned = install.activate_steps(places, manifest, Relocated(PurePosixPath(places.release), ()))
    assert [step.name for step in planned] == ["complete", "seal", "smoke test", "mark", "switch", "tidy"]
    smoke = planned[2].do
    assert "import sys, torch'" in smoke
    assert "deepspeed" not in smoke
    assert "bin/torchrun --help" in smoke


def listing(current, complete, history, used=()):
    lines = [f"current {current}"]
    lines += [f"release {name} ok {when}" for when, name in enumerate(complete)]
    lines += ["release junk broken 0"]
    lines += [f"history {when} {name}" for when, name in enumerate(history)]
    lines += [f"used {name} {process}" for name, process in used]
    return catalog.read_listing("\n".join([*lines, "end"]))


def test_the_previous_release_is_the_one_that_was_current_before():
    assert listing("b", "abc", "abcb").previous == "c"
    assert listing("b", "ab", "acb").previous == "a"  # c is deleted
    assert listing("b", "ab", "").previous == "a"  # the history was lost
    assert listing("b", "b", "b").previous is None
    assert listing("b", "abc", "abc").previous == "a"  # the switch to c was killed before its rename


@pytest.mark.parametrize(
    ("found", "keep", "gone"),
    [
        (listing("d", "abcd", "abcd"), 2, {"a", "b", "junk"}),
        (listing("d", "abcd", "abcd"), 1, {"a", "b", "c", "junk"}),
        (listing("a", "abcd", "abcda"), 2, {"b", "c", "junk"}),  # after a rollback, where one came from stays
        (listing("d", "abcd", "abcd", [("a", "17"), ("junk", "4")]), 1, {"b", "c"}),
        (listing("d", "d", "d"), 5, {"junk"}),
    ],
)
def test_releases_that_prune_may_remove(found, keep, gone):
    assert set(found.removable(keep)) == gone


def test_empty_node_has_no_releases():
    assert catalog.read_listing("end\n") == Releases()
    assert Releases().removable(1) == ()


def test_finding_counts_and_names_differences():
    many = "".join(f"bad changed lib/{number}.py\n" for number in range(7))
    finding = catalog.verify_finding("node01", "abc", f"checked 90\n{many}bad added x y\nbad link bin/python\nend\n")
    assert finding.verdict == "FAIL"
    assert "7 changed (lib/0.py, lib/1.py, lib/2.py, lib/3.py, lib/4.py, ...)" in finding.observed
    assert "1 added (x y)" in finding.observed
    assert "1 links changed (bin/python)" in finding.observed
    assert finding.fix == "clusterctl deploy --repair --limit node01"
    good = catalog.verify_finding("node01", "abc", "checked 97\nend\n")
    assert (good.verdict, "97 files" in good.observed) == ("OK", True)
