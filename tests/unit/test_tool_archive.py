"""The tool's archive holds plain files below its folder, whatever is packed: tar unpacks it without looking."""

import gzip
import io
import os
import tarfile

from provision.model import ignore
from provision.tool import distributions, pack
from provision.tool.contents import Item


def test_every_member_is_a_plain_file_with_a_fixed_mode_and_owner(tmp_path):
    (tmp_path / "target").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "target").chmod(0o6777)
    (tmp_path / "link").symlink_to("target")
    os.link(tmp_path / "target", tmp_path / "hard")
    names = ("bin/a", "lib/" + "l" * 180 + "/x.py")
    items = {name: Item(tmp_path / "link", executable=True) for name in names} | {"lib/hard": Item(tmp_path / "hard")}
    out = io.BytesIO()
    pack.write_archive(items, out, ignore)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(out.getvalue()))) as tar:
        members = tar.getmembers()
    assert {member.type for member in members} == {tarfile.REGTYPE}
    assert {(member.mode, member.uid, member.gid) for member in members} == {(0o755, 0, 0), (0o644, 0, 0)}
    assert not any(member.name.startswith("/") or ".." in member.name.split("/") for member in members)


def test_files_listed_by_a_distribution_stay_below_the_folder(tmp_path):
    class Package:
        metadata = {"Name": "x"}  # noqa: RUF012 - as importlib.metadata has it
        files = ("x/__init__.py", str(tmp_path / "outside"), "../../outside")

        def locate_file(self, _):
            return tmp_path / "site"

        def read_text(self, name):
            return "x" if name == "RECORD" else ""

    (tmp_path / "site/x").mkdir(parents=True)
    (tmp_path / "site/x/__init__.py").write_text("")
    (tmp_path / "outside").write_text("secret")
    assert [name for name, _ in distributions.files(Package())] == ["x/__init__.py"]
