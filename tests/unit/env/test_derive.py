"""Which rewritten files a node can make from those of an older release, and that they come out right."""

from pathlib import PurePosixPath

import pytest

from provision.env.bundle.reader import open_bundle
from provision.env.release.install import Recipe, derive_recipe
from provision.env.relocation import relocate

OLD, NEW = PurePosixPath("/opt/llm/releases/0123456789ab"), PurePosixPath("/opt/llm/releases/ba9876543210")


@pytest.fixture
def bundle(packed):
    return open_bundle(packed)


def test_nearly_every_rewritten_file_can_be_made_by_replacing_words(bundle):
    files = bundle.prefix_files()
    before, after = (relocate(bundle.manifest, files, prefix) for prefix in (OLD, NEW))
    found = derive_recipe(bundle.manifest, files, after, OLD)
    old = {entry.path: data for entry, data in before.files if entry.type == "file"}
    new = {entry.path: data for entry, data in after.files if entry.type == "file"}
    changed = {path for path in new if new[path] != old[path]}
    assert {entry.path for entry in found.entries} == changed
    assert {"bin/hello", "lib/libconda.so"} < changed
    assert any(path.endswith("RECORD") for path in changed)
    for path in changed:
        data = old[path]
        for one, other in found.words:
            assert len(one) == len(other)
            data = data.replace(one, other)
        assert data == new[path]
    everything = b"".join(old.values())
    assert [one for one, _ in found.words if one not in everything] == [], "words that replace nothing are not sent"


def test_words_have_no_special_characters_of_sed(bundle):
    files = bundle.prefix_files()
    found = derive_recipe(bundle.manifest, files, relocate(bundle.manifest, files, NEW), OLD)
    allowed = set(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
    assert found.words
    assert all(set(word) <= allowed for pair in found.words for word in pair)
    assert found.script.count(b"\n") == len(found.words)


@pytest.mark.parametrize("old", ["/opt/llm/releases/longer-than-the-other", "/elsewhere/releases/0123456789ab"])
def test_another_root_or_length_gives_no_recipe(bundle, old):
    files = bundle.prefix_files()
    assert derive_recipe(bundle.manifest, files, relocate(bundle.manifest, files, NEW), PurePosixPath(old)) == Recipe()
