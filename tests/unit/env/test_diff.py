"""The output of ``clusterctl diff``."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from provision.env.bundle.manifest import Package
from provision.env.bundle.reader import open_bundle
from provision.env.difference import (
    Version,
    compare,
    difference_text,
    fact_changes,
    find_owners,
    owner,
    package_changes,
)
from provision.env.packing.pack import PackOptions, pack
from provision.errors import BundleError, UsageError
from provision.model import ignore
from provision.summaries.bundles import difference_output
from provision.tasks.bundles import diff


@pytest.fixture
def env(tmp_path, helpers):
    return helpers.make_env(tmp_path / "opt/env")


@pytest.fixture
def packs(tmp_path, helpers):
    """Packs an environment as it is now."""

    def packs(env, name):
        out = tmp_path / f"{name}.ccb"
        pack(env, out, name=name, emit=ignore, options=PackOptions(limit=helpers.LIMIT))
        return out

    return packs


def reported(difference):
    data, text = difference_output(difference)
    json.dumps(data)
    assert max(map(len, text.splitlines())) <= 80 or "/" in text
    return " ".join(text.split())


def test_equal_bundles_are_reported_as_equal(env, packs):
    difference = diff(packs(env, "a"), packs(env, "b"))
    assert difference.identical
    assert difference.sending == (0, 0, 0)
    assert "the same release: a deploy sends nothing" in reported(difference)


def test_environment_rebuilt_from_the_same_packages_differs_in_times_only(env, packs, helpers):
    pyc = env / helpers.SITE / "hello/__pycache__/plain.cpython-311.pyc"
    helpers.write(pyc, b"\xa7\r\r\n" + bytes(4) + b"\1\2\3\4" + b"\6\0\0\0" + b"code")
    old = packs(env, "old")
    for path in env.rglob("*"):
        if not path.is_dir():
            os.utime(path, (1_750_000_000, 1_750_000_000), follow_symlinks=False)
    helpers.write(pyc, b"\xa7\r\r\n" + bytes(4) + b"\5\6\7\x08" + b"\6\0\0\0" + b"code")
    helpers.write(env / "conda-meta/history", f"==> 2026-02-02 <==\n# cmd: conda create -p {env}\n")
    difference = diff(old, packs(env, "new"))
    assert not difference.identical
    assert difference.same_content
    assert difference.sending == (0, 0, 0)
    assert difference.recompiled == 1
    text = reported(difference)
    assert "same content, different times" in text
    assert "1 file compiled again from the same source" in text
    assert "0 of" in text


def test_changes_are_named_by_package_and_sent_bytes_are_counted(env, packs, helpers):
    old = packs(env, "old")
    helpers.add_package(env, "added", {f"{helpers.SITE}/added/__init__.py": "A = 1\n", "bin/added": "#!/bin/sh\n"})
    shutil.rmtree(env / helpers.SITE / "big")
    shutil.rmtree(env / helpers.SITE / "big-1.0.dist-info")
    shutil.rmtree(env / helpers.SITE / "other-1.0.dist-info")
    helpers.add_package(env, "other", {f"{helpers.SITE}/other/7.py": "N = 8\n"}, version="2.0")
    helpers.write(env / helpers.SITE / "hello/plain.py", "X = 2\n")
    helpers.write(env / "share/mine.txt", "mine")
    (env / "bin/hello-sh").chmod(0o700)
    difference = diff(old, packs(env, "new"))
    assert difference.packages == (
        Version("added", "", "1.0"),
        Version("big", "1.0", ""),
        Version("other", "1.0", "2.0"),
    )
    assert difference.touched == ("hello",)
    changes = {change.path: (change.sign, change.owner) for change in difference.changes}
    assert changes["share/mine.txt"] == ("+", "share/")
    assert changes["bin/hello-sh"] == ("~", "hello")  # it contains the prefix; a RECORD names its package
    assert changes[f"{helpers.SITE}/big/big.bin"] == ("-", "big")
    assert changes[f"{helpers.SITE}/hello/plain.py"] == ("~", "hello")
    assert f"{helpers.SITE}/added" not in changes  # a folder is listed with its files
    old_keys = {chunk.key for chunk in difference.old.chunks}
    missing = [chunk for chunk in difference.new.chunks if chunk.key not in old_keys]
    assert difference.sending == (len(missing), sum(c.compressed for c in missing), sum(c.size for c in missing))
    assert {chunk.package for chunk in missing} >= {"added", "hello", "other"}
    assert "big" not in {chunk.package for chunk in missing}
    text = reported(difference)
    for words in ("added added 1.0", "removed big 1.0", "changed other 1.0 -> 2.0", "hello files: 2 changed"):
        assert words in text
    assert "share/mine.txt" not in text
    listed = difference_text(difference, files=True)
    assert "\n+ share/mine.txt\n" in listed + "\n"
    assert f"\n- {helpers.SITE}/big/big.bin\n" in listed


def test_added_data_have_a_separate_line(env, tmp_path, helpers):
    helpers.write(tmp_path / "set/x.txt", "x" * 5000)
    pack(env, tmp_path / "old.ccb", name="old", emit=ignore, options=PackOptions(data=[tmp_path / "set"]))
    helpers.write(tmp_path / "set/x.txt", "y" * 5000)
    pack(env, tmp_path / "new.ccb", name="new", emit=ignore, options=PackOptions(data=[tmp_path / "set"]))
    difference = diff(tmp_path / "old.ccb", tmp_path / "new.ccb")
    assert difference.data == ("data/set/",)
    assert difference.unowned == ()
    assert "data data/set/ files: 1 changed" in reported(difference)


def test_the_same_environment_at_another_prefix_has_the_same_content(tmp_path, helpers, packs):
    one = packs(helpers.make_env(tmp_path / "one"), "one")
    two = packs(helpers.make_env(tmp_path / "somewhere/two"), "two")
    difference = diff(one, two)
    differing = {change.path for change in difference.changes}
    # Random bytes; what only looks like the prefix, in a file, in what it was compiled to and in what lists its hash;
    # and a binary that is longer where the prefix was.
    assert differing <= {
        f"{helpers.SITE}/big/big.bin",
        f"{helpers.SITE}/big-1.0.dist-info/RECORD",
        f"{helpers.SITE}/hello/__init__.py",
        f"{helpers.SITE}/hello/__pycache__/__init__.cpython-311.pyc",
        f"{helpers.SITE}/hello-1.0.dist-info/RECORD",
        "lib/libown.so",
    }


def test_names_and_versions_of_two_kinds_are_distinguished(packed):
    old = open_bundle(packed).manifest
    new = replace(old, packages=(Package("a", "1", "pypi"), Package("b", "2", "conda"), Package("b", "3", "pypi")))
    old = replace(old, packages=(Package("a", "1", "conda"), Package("b", "2", "conda")))
    assert list(package_changes(old, new)) == [
        Version("a", "1 (conda)", "1 (pypi)"),
        Version("b", "2 (conda)", "2 (conda) and 3 (pypi)"),
    ]


def test_facts_that_differ_are_named(packed):
    old = open_bundle(packed).manifest
    old = replace(old, glibc="2.28", gpu_architectures=("sm_90", "sm_80"), versions={"cuda": "12.8", "torch": "2.9"})
    new = replace(old, glibc="2.34", gpu_architectures=("sm_100", "sm_90"), versions={"cuda": "13.0", "torch": "2.9"})
    assert list(fact_changes(old, new)) == [
        Version("glibc", "2.28", "2.34"),
        Version("cuda", "12.8", "13.0"),
        Version("GPU architectures", "sm_80 sm_90", "sm_90 sm_100"),
    ]
    assert list(fact_changes(old, old)) == []


def test_owners_are_read_from_records_and_conda_meta():
    site = "lib/python3.11/site-packages"
    files = {
        f"{site}/My.Pack-1.0.dist-info/RECORD": b"../../../bin/tool,sha256=x,1\nmy/a.py,,\n/p/share/abs,,\n",
        "conda-meta/c-1-0.json": json.dumps({"name": "c", "files": ["bin/tool", "lib/c.so"]}).encode(),
        "conda-meta/history": b"==> 2026 <==\n",
        f"{site}/bad-1.0.dist-info/RECORD": b'"\n',
    }
    known = find_owners(files, "/p")
    assert known["bin/tool"] == "c"  # conda's word comes before pip's, as when chunks are made
    assert known[f"{site}/my/a.py"] == "my-pack"
    assert known["share/abs"] == "my-pack"
    assert owner(f"{site}/Other_One-2.dist-info/direct_url.json", known) == "other-one"
    assert owner("conda-meta/history", known) == "conda-meta/"


def test_a_bundle_that_cannot_be_read_is_named(packed, tmp_path):
    with pytest.raises(UsageError, match=r"missing\.ccb"):
        diff(packed, tmp_path / "missing.ccb")
    (tmp_path / "bad.ccb").write_bytes(b"no bundle at all")
    with pytest.raises(BundleError, match=r"bad\.ccb"):
        diff(tmp_path / "bad.ccb", packed)


def test_compare_reads_bundles_that_are_open_already(packed):
    bundle = open_bundle(packed)
    assert compare(bundle, bundle).identical
