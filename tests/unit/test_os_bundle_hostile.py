"""Hostile bundles of OS packages: root unpacks their files and gives them to apt."""

import hashlib
import json
import os
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.env.bundle import tar
from provision.errors import BundleError
from provision.ospackages import bundle, releases
from provision.ospackages.bundle import open_bundle
from provision.ospackages.releases import Collected, Mirrors, Package, Wanted

DEB = b"not really a package"
MTIME = 315532800


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A bundle with a real layout; its packages are none."""
    folder = tmp_path_factory.mktemp("osb")
    (folder / "x.deb").write_bytes(DEB)
    found = tuple(
        Package(name, "1:4.2+really1~2", "amd64", f"debs/{name}_1_all.deb", len(DEB), hashlib.sha256(DEB).hexdigest())
        for name in ("chrony", "libc6", "opensm")
    )
    wanted = Wanted(releases.find("debian12"), "amd64", ("chrony",), Mirrors("http://m", None, folder / "keys"))
    index = {"Packages": b"index", "Release": b"release"}
    bundle.write(
        folder / "os.osb", wanted, Collected(found, dict.fromkeys([f.file for f in found], folder / "x.deb"), index)
    )
    return folder / "os.osb"


def with_manifest(path, data, members=None):
    """A bundle with this manifest and its correct digest, in the form that the reader expects."""
    data = {key: value for key, value in data.items() if key != "sha256"}
    data["sha256"] = bundle.digest_of(data)
    out = path.with_name("hostile.osb")

    def member(name, content):
        return tar.header(name.encode(), size=len(content), mtime=MTIME) + content + bytes(tar.padding(len(content)))

    content = {"Packages": b"index", "Release": b"release"}
    names = (
        [each["name"] for each in data["index"]] + [each["file"] for each in data["packages"]]
        if members is None
        else members
    )
    raw = (json.dumps(data, indent=1) + "\n").encode()
    parts = [member(str(name), content.get(name, DEB)) for name in names]
    out.write_bytes(member("manifest.json", raw) + b"".join(parts) + tar.END)
    return out


def manifest_of(path):
    return json.loads(open_bundle(path).manifest.to_json())


def test_unmodified_bundle_is_valid(whole):
    assert with_manifest(whole, manifest_of(whole)).read_bytes() == whole.read_bytes()


EVIL = {
    "an option of apt": (lambda d: d.update(requested=["-oDPkg::Pre-Invoke::=reboot"]), "requested: '-oDPkg"),
    "two words": (lambda d: d.update(requested=["chrony -y"]), "requested"),
    "a pattern": (lambda d: d.update(requested=["*"]), "requested"),
    "a name that goes": (lambda d: d.update(requested=["chrony/"]), "requested"),
    "a newline": (lambda d: d["packages"][0].update(name="chrony\n"), "name"),
    "a version": (lambda d: d["packages"][0].update(version="1 2"), "version"),
    "an architecture": (lambda d: d["packages"][0].update(architecture="$(x)"), "architecture"),
    "a release": (lambda d: d.update(release="debian12)"), "release"),
    "a family": (lambda d: d.update(family="../apt"), "family"),
    "a place": (lambda d: d["packages"][0].update(file="../../etc/cron.d/x.deb"), "file"),
    "a place that the node uses": (lambda d: d["packages"][0].update(file="lists/x.deb"), "file"),
    "a long place": (lambda d: d["packages"][0].update(file="debs/" + "x" * 300 + ".deb"), "file"),
    "an index that the node writes": (lambda d: d["index"][0].update(name="transaction"), "the index contains"),
    "the manifest again": (lambda d: d["index"][0].update(name="manifest.json"), "the index contains"),
    "the same file twice": (lambda d: d["packages"].append(d["packages"][0]), "a file is listed twice"),
    "a size": (lambda d: d["packages"][0].update(size=True), "is not a size"),
    "a huge size": (lambda d: d["packages"][0].update(size=1 << 60), "is not a size"),
    "a negative size": (lambda d: d["packages"][0].update(size=-1), "is not a size"),
    "a size of many digits": (lambda d: d["packages"][0].update(size=10**4000), "4001 digits"),
    "no number": (lambda d: d["packages"][0].update(size=float("nan")), "is not a size"),
    "a digest": (lambda d: d["packages"][0].update(sha256="A" * 64), "is not a sha256"),
    "another key": (lambda d: d.update(more=1), "its manifest is damaged"),
    "no packages": (lambda d: d.pop("packages") and None, "it lacks 'packages'"),
    "packages that are none": (lambda d: d.update(packages={}), "packages is not a list"),
    "nested": (lambda d: d.update(release=[[[[[]]]]]), "nested"),
}


@pytest.mark.parametrize("case", EVIL)
def test_invalid_manifest_is_refused_and_the_key_is_named(whole, case):
    change, message = EVIL[case]
    data = manifest_of(whole)
    change(data)
    with pytest.raises(BundleError, match=message) as error:
        open_bundle(with_manifest(whole, data, members=[]))
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_nothing_but_plain_files_reaches_tar_on_a_node(whole, kind):
    """The header of every member is compared to the byte: no link, device or set-uid bit can come with a package."""
    data = bytearray(whole.read_bytes())
    at = data.index(b"debs/chrony", 1024)
    at -= at % 512
    info = tarfile.TarInfo("debs/chrony_1_all.deb")
    info.type, info.linkname, info.mtime, info.size = kind, "/etc/passwd", MTIME, len(DEB)
    data[at : at + 512] = info.tobuf(tarfile.GNU_FORMAT)
    out = whole.with_name("kind.osb")
    out.write_bytes(data)
    with pytest.raises(BundleError, match="is damaged"):
        open_bundle(out)


@pytest.mark.parametrize("change", [{"mode": 0o4755}, {"uid": 1000}, {"uname": "root"}, {"name": "../x"}])
def test_other_forms_of_headers_are_refused(whole, change):
    data = bytearray(whole.read_bytes())
    at = data.index(b"debs/chrony", 1024)
    at -= at % 512
    info = tarfile.TarInfo.frombuf(bytes(data[at : at + 512]), "utf-8", "strict")
    for key, value in change.items():
        setattr(info, key, value)
    data[at : at + 512] = info.tobuf(tarfile.GNU_FORMAT)
    assert bytes(data) != whole.read_bytes()
    out = whole.with_name("form.osb")
    out.write_bytes(data)
    with pytest.raises(BundleError, match="is damaged"):
        open_bundle(out)


@pytest.mark.parametrize("size", [200 << 30, 65 << 20])  # in base 256, and in octal digits
def test_a_sparse_file_with_a_large_manifest_is_refused_unread(tmp_path, size):
    out = tmp_path / "sparse.osb"
    out.write_bytes(tar.header(b"manifest.json", size=size, mtime=MTIME))
    os.truncate(out, size + 10_000)
    with pytest.raises(BundleError, match="not a bundle of OS packages"):
        open_bundle(out)


def test_a_flipped_byte_in_the_manifest_is_refused(whole):
    """A version with one other character is valid text, so only the manifest's own digest shows the damage."""
    content = whole.read_bytes()
    for value in (b'"1:4.2+really1~2"', b'"debian12"', b'"chrony"'):
        at = content.index(value) + len(value) - 2
        out = whole.with_name("flipped.osb")
        out.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(BundleError, match="manifest is damaged: it differs from its sha256"):
            open_bundle(out)


@given(st.data())
def test_any_mutation_of_a_bundle_is_refused(whole, data):
    before = whole.read_bytes()
    content = bytearray(before)
    at = data.draw(st.integers(0, len(content) - 1))
    piece = data.draw(
        st.binary(max_size=600) | st.sampled_from([b"", bytes(512), content[:512], content[at : at + 512] * 2])
    )
    content[at : at + data.draw(st.sampled_from([0, 512, len(piece)]))] = piece
    out = whole.with_name("mutated.osb")
    out.write_bytes(content)
    if content != before:
        with pytest.raises(BundleError):
            open_bundle(out)


@given(st.data())
def test_any_mutation_of_a_manifest_is_refused_or_read_consistently(whole, data):
    document = manifest_of(whole)
    holder = data.draw(st.sampled_from([document, *document["packages"], *document["index"]]))
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=30)
        | st.lists(st.text(max_size=5), max_size=2)
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
    )
    raw = (json.dumps(document, indent=1) + "\n").encode()
    try:
        found = bundle.parse(raw)
    except BundleError:
        return
    assert found.to_json() == raw
    assert all(name[0].isalnum() and " " not in name for name in found.requested)
    assert all(".." not in member.name.split("/") for member in found.members)
