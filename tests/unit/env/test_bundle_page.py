"""docs/bundle.md explains how to open a bundle by hand; these tests run its commands."""

import hashlib
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from provision.env.bundle.layout import INDEX, MANIFEST
from provision.env.bundle.reader import open_bundle
from provision.env.packing import chunks, detect
from provision.env.packing.pack import PackOptions, pack
from provision.model import ignore

PAGE = Path(__file__).parents[3] / "docs" / "bundle.md"
MISSING = [tool for tool in ("tar", "zstd", "python3", "sha256sum") if shutil.which(tool) is None]


def commands(section):
    """The commands in a section of the page."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", text, re.MULTILINE)
    return "".join(textwrap.dedent(block) for block in blocks if block.strip())


@pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {' '.join(MISSING)}")
@pytest.mark.parametrize("split", [0, 30_000])
def test_the_page_opens_a_bundle(prefix, tmp_path, helpers, split):
    folder = tmp_path / "by hand"
    folder.mkdir()
    pack(prefix, folder / "llm.ccb", name="llm", emit=ignore, options=PackOptions(limit=helpers.LIMIT, split=split))
    assert (folder / "llm.ccb").exists() == (not split)
    script = commands("In parts") if split else ""
    subprocess.run(["sh", "-euc", script + commands("Open it by hand")], cwd=folder, check=True, capture_output=True)
    found = helpers.tree(folder / "env")
    for path, what in helpers.tree(prefix).items():
        assert found[path] == what
    for path, target in helpers.HARD_LINKS.items():
        assert (folder / "env" / path).samefile(folder / "env" / target)


def test_the_page_names_every_member_and_every_bound(packed):
    text = PAGE.read_text()
    for member in open_bundle(packed).manifest.stored:
        name = re.sub(r"[0-9a-f]{64}", "<digest>", member.member)
        assert f"| `{name}` |" in text
    for name in (INDEX, MANIFEST):
        assert f"| `{name}` |" in text
    assert f"Files over {chunks.LIMIT >> 20} MiB are cut into raw ranges" in text
    assert f"A file over {detect.REWRITABLE >> 20} MiB is not rewritten" in " ".join(text.split())


def test_page_explains_how_keys_are_computed(packed):
    """With the page's rules, not with the packer's code; the .pyc files of this environment contain no time."""
    bundle = open_bundle(packed)
    for index, chunk in enumerate(bundle.manifest.chunks):
        if chunk.kind == "tar":
            digest = hashlib.sha256()
            for entry in bundle.manifest.members(index):
                reported = entry.sha256 if entry.type == "file" else entry.target
                fields = (entry.path, entry.type, f"{entry.mode:o}", reported)
                digest.update(b"".join(field.encode("utf-8", "surrogateescape") + b"\0" for field in fields))
            assert digest.hexdigest() == chunk.key
    for entry in bundle.manifest.files:
        offset = 0
        for index in entry.chunks if entry.raw else ():
            chunk = bundle.manifest.chunks[index]
            record = f"{entry.path}\0raw\0{entry.mode:o}\0{offset}:{entry.sha256}\0"
            assert chunk.key == hashlib.sha256(record.encode()).hexdigest()
            offset += chunk.size
