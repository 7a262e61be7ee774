"""``pack-os`` with a real apt, against a mirror of the test; and refusals of a reader."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import tarfile

import pytest
from deb_mirror import Deb, make

from provision.errors import BundleError, UsageError
from provision.model import ignore
from provision.ospackages import bundle, families, releases
from provision.ospackages.bundle import open_bundle
from provision.tasks.bundles import pack_os

needs = pytest.mark.skipif(
    not all(map(shutil.which, ("apt-get", "dpkg-deb", "gpg", "gpg-agent"))),
    reason="needs apt-get, dpkg-deb, gpg and gpg-agent",
)

DEBS = (
    # bash is on every machine with apt, and must travel all the same: the node's own state is not this machine's
    Deb("clock", "1:4.2+really1~2", {"Depends": "libtime (>= 2), bash", "Recommends": "unwanted"}),
    Deb("libtime", "1"),
    Deb("libtime", "2", suite="-security"),
    Deb("bash", "5", {"Depends": "libshell"}),
    Deb("libshell"),
    Deb("fabric", component="universe", suite="-updates"),
    Deb("one-mta", fields={"Provides": "mta"}),
    Deb("other-mta", fields={"Provides": "mta"}),
    Deb("server", fields={"Provides": "only-server"}),
    Deb("unwanted"),
    Deb("broken", fields={"Depends": "not-here"}),
)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    return make(tmp_path_factory.mktemp("mirror"), "jammy", DEBS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def pack(mirror, cache, tmp_path):
    def run(*packages, release="ubuntu22.04", into=cache, **options):
        options = {"mirror": mirror.uri, "keyring": mirror.keyring, "output": tmp_path / "os.osb"} | options
        return pack_os(release, packages, environ={"CLUSTERCTL_CACHE": str(into)}, emit=ignore, **options).bundle

    return run


@pytest.fixture(scope="module")
def packed(mirror, cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "os.osb"
    environ = {"CLUSTERCTL_CACHE": str(cache)}
    pack_os(
        "ubuntu22.04", ("clock",), environ=environ, mirror=mirror.uri, keyring=mirror.keyring, output=out, emit=ignore
    )
    return out


@needs
def test_the_closure_is_that_of_an_empty_machine_with_its_security_updates(packed):
    found = open_bundle(packed).manifest
    assert (found.release, found.architecture, found.requested) == ("ubuntu22.04", "amd64", ("clock",))
    assert {each.name: each.version for each in found.packages} == {
        "bash": "5",
        "clock": "1:4.2+really1~2",
        "libshell": "1",
        "libtime": "2",
    }


@needs
def test_plain_tar_and_sha256sum_open_it_and_apt_reads_its_index(packed, tmp_path):
    subprocess.run(["tar", "-xf", packed, "-C", tmp_path], check=True)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    index = (tmp_path / "Packages").read_text()
    for package in manifest["packages"]:
        data = (tmp_path / package["file"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (package["size"], package["sha256"])
        assert f"Filename: ./{package['file']}\n" in index
    assert (
        f" {hashlib.sha256(index.encode()).hexdigest()} {len(index)} Packages\n" in (tmp_path / "Release").read_text()
    )
    described = subprocess.run(
        ["dpkg-deb", "-f", tmp_path / manifest["packages"][1]["file"], "Depends"], check=True, capture_output=True
    ).stdout.decode()
    assert "Package: clock\nVersion: 1:4.2+really1~2\n" in index
    assert f"Depends: {described}" in index


@needs
def test_equal_packages_make_equal_bytes_wherever_they_are_packed(pack, packed, tmp_path):
    again = pack("clock", into=tmp_path / "another cache".replace(" ", "-"))
    assert again.path.read_bytes() == packed.read_bytes()


@needs
def test_updates_and_universe_are_searched(pack):
    assert pack("fabric", "server").manifest.versions == {"fabric": "1", "server": "1"}


@needs
def test_a_package_that_was_changed_in_the_cache_is_fetched_again(pack, packed, cache):
    kept = next((cache / "os-packages").glob("*/archives/libshell*"))
    good = kept.read_bytes()
    kept.write_bytes(good[:-1] + b"x")  # of the same length: apt would take it
    assert pack("libshell").manifest.packages[0].sha256 == hashlib.sha256(good).hexdigest()


@needs
@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        (("clokc", "fabrik", "clock"), "ubuntu22.04 has no package clokc, fabrik", "spelling"),
        (("mta",), "mta is a virtual package", "one-mta, other-mta"),
        (("only-server",), "only-server is a virtual package", "name one of server"),
        (("broken",), "broken : Depends: not-here", ""),
        (("clock=1",), "'clock=1' is not the name of a package", "without versions"),
        (("clock-",), "'clock-' is not the name of a package", ""),
        (("--help",), "'--help' is not the name of a package", ""),
    ],
)
def test_invalid_package_names(pack, tmp_path, names, message, hint):
    with pytest.raises(UsageError) as error:
        pack(*names)
    assert message in str(error.value)
    assert hint in error.value.hint
    assert not list(tmp_path.iterdir())


@needs
def test_mirror_signed_by_another_key_is_refused(pack, tmp_path):
    other = make(tmp_path / "other", "jammy", ())
    with pytest.raises(UsageError, match=r"the mirror copy:\S+ is not signed by a key of .*other/keyring.gpg"):
        pack("clock", keyring=other.keyring)


@needs
def test_a_mirror_without_the_release_is_named(pack, tmp_path):
    with pytest.raises(UsageError, match=r"the mirror copy:\S+ has no noble"):
        pack("clock", release="ubuntu24.04")
    bare = make(tmp_path / "bare", "jammy", DEBS, suites=("", "-updates"))
    options = {"mirror": bare.uri, "keyring": bare.keyring}
    with pytest.raises(UsageError, match="has no jammy-security") as error:
        pack("libshell", **options)
    assert "--security-mirror URL" in error.value.hint
    assert pack("libshell", **options, security_mirror="none").manifest.versions == {"libshell": "1"}


@needs
def test_a_mirror_that_cannot_be_reached_is_named(pack, mirror):
    with socket.socket() as taken:  # bound, without a listener
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/ubuntu"
        with pytest.raises(UsageError, match=f"the mirror {address}/dists/jammy/InRelease failed") as error:
            pack("clock", mirror=address)
    assert "--mirror URL" in error.value.hint


@needs
def test_package_that_differs_from_the_signed_index(tmp_path):
    damaged = make(tmp_path / "mirror", "jammy", (Deb("clock"),))
    file = next(damaged.folder.glob("pool/clock*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match=r"clock\S* failed: Hash Sum mismatch"):
        pack_os(
            "ubuntu22.04",
            ("clock",),
            environ={"CLUSTERCTL_CACHE": str(tmp_path)},
            mirror=damaged.uri,
            keyring=damaged.keyring,
            output=tmp_path / "os.osb",
            emit=ignore,
        )
    assert not (tmp_path / "os.osb").exists()


@needs
def test_a_missing_keyring_names_the_package_that_has_it(mirror, tmp_path):
    family = families.of(releases.find("noble"))
    with pytest.raises(UsageError, match=r"absent\.gpg is missing"):
        family.mirrors(
            releases.find("noble"), "amd64", main=None, security=None, keyring=tmp_path / "absent.gpg", own={}
        )


def damage(data, kind):
    """The bundle's bytes, spoiled."""
    at = {"in the manifest": 600, "in a package": len(data) // 2, "in a header": data.rindex(b"debs/") + 130}.get(kind)
    if at is not None:
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return {
        "half of it": data[: len(data) // 2],
        "without its last byte": data[:-1],
        "within the first block": data[:300],
        "with more behind it": data + b"x",
        "empty": b"",
        "of another kind": b"#!/bin/sh\n" + data,
    }[kind]


@needs
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("in the manifest", "manifest"),
        ("in a package", "is damaged"),
        ("in a header", "is damaged"),
        ("half of it", "is truncated"),
        ("without its last byte", "is truncated"),
        ("within the first block", "is not a bundle"),
        ("with more behind it", "has data after its end"),
        ("empty", "is not a bundle"),
        ("of another kind", "is not a bundle"),
    ],
)
def test_incomplete_bundle_is_refused(packed, tmp_path, kind, message):
    path = tmp_path / "bad.osb"
    path.write_bytes(damage(packed.read_bytes(), kind))
    with pytest.raises(BundleError, match=message) as error:
        open_bundle(path)
    assert str(path) in str(error.value)


@needs
def test_every_truncation_is_detected(packed, tmp_path):
    data = packed.read_bytes()
    path = tmp_path / "short.osb"
    for length in range(0, len(data), 397):
        path.write_bytes(data[:length])
        with pytest.raises(BundleError):
            open_bundle(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "has format 3"),
        ({"format": "another"}, "not a bundle of OS packages"),
        ({"requested": "clock"}, "not valid"),
        ({"release": "$(reboot)\n"}, "is not a name"),
    ],
)
def test_a_manifest_with_impossible_values(tmp_path, change, message):
    manifest = {"format": "clusterctl-os-packages", "version": 2, "release": "debian12", "family": "apt"}
    manifest |= {"architecture": "amd64", "requested": [], "packages": [], "index": []} | change
    path = tmp_path / "odd.osb"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        data = (json.dumps(manifest, indent=1) + "\n").encode()
        (tmp_path / "manifest.json").write_bytes(data)
        archive.add(tmp_path / "manifest.json", "manifest.json", filter=_plain)
    with pytest.raises(BundleError, match=message):
        open_bundle(path)


def _plain(info):
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode, info.mtime = 0o644, bundle.MTIME
    return info


@pytest.mark.parametrize("name", ["../../etc/cron.d/x", "/etc/passwd", "debs/../x", ".hidden", "a/b/c"])
def test_places_outside_the_repository_are_refused(name):
    with pytest.raises(ValueError, match="not a path in a bundle"):
        bundle.check_path(name)


@pytest.mark.parametrize("name", ["rocky9", "rocky9.4", "openeuler22.03", "kylinv10"])
def test_rpm_families_are_named_plainly(name):
    with pytest.raises(UsageError, match=r"has rpm packages, which this version of clusterctl cannot pack"):
        families.of(releases.find(name))


def test_an_unknown_release_lists_those_that_are_known():
    with pytest.raises(UsageError) as error:
        releases.find("debian7")
    assert "debian12, debian13, ubuntu22.04, ubuntu24.04" in error.value.hint


def test_an_output_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        pack_os("debian12", (), environ=dict(os.environ), output=tmp_path, emit=ignore)
