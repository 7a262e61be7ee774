"""Decisions of the service os_packages: the bundle of each node, and verdicts about answers."""

import io
import tarfile
from pathlib import Path, PurePosixPath

import pytest
from pydantic import ValidationError

from provision.errors import BundleError, ClusterctlError, UsageError
from provision.model import Inventory, Node
from provision.ospackages import bundle, node, releases
from provision.ospackages.releases import Collected, Mirrors, Package, Wanted
from provision.services import os_packages as service

DEB = b"not really a package"


def make_bundle(path, release="debian12", packages=("chrony", "opensm")):
    """A bundle with a real layout; its packages are none."""
    import hashlib

    found = tuple(
        Package(name, "1", "all", f"debs/{name}_1_all.deb", len(DEB), hashlib.sha256(DEB).hexdigest())
        for name in packages
    )
    deb = path.with_suffix(".deb")
    deb.write_bytes(DEB)
    mirrors = Mirrors("http://mirror", None, Path("keyring"))
    wanted = Wanted(releases.find(release), "amd64", tuple(packages), mirrors)
    index = {"Packages": f"index of {release}".encode(), "Release": b"release"}
    bundle.write(path, wanted, Collected(found, {each.file: deb for each in found}, index))
    return path


@pytest.fixture
def inventory(tmp_path):
    return Inventory(tmp_path / "inventory.yaml", PurePosixPath("/opt/llm/current"), (Node("node01", "10.0.0.1"),))


def choices(inventory, **options):
    return service.choices(service.Options(**options), inventory)


def test_each_bundle_beside_the_inventory_is_used_for_its_release(inventory, tmp_path):
    make_bundle(tmp_path / "a.osb")
    make_bundle(tmp_path / "b.osb", "ubuntu22.04")
    assert {each.name: each.packages for each in choices(inventory)} == {
        "debian12-amd64": ("chrony", "opensm"),
        "ubuntu22.04-amd64": ("chrony", "opensm"),
    }
    (only,) = choices(inventory, bundle="b.osb", packages=["opensm"])
    assert (only.name, only.packages) == ("ubuntu22.04-amd64", ("opensm",))


def test_a_mapping_may_use_codenames(inventory, tmp_path):
    make_bundle(tmp_path / "a.osb")
    assert [each.name for each in choices(inventory, bundle={"bookworm": "a.osb"})] == ["debian12-amd64"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"bundle": "absent.osb"}, UsageError, "absent.osb: no such file"),
        ({"bundle": "inventory.yaml"}, BundleError, "is not a bundle of OS packages"),
        (
            {"bundle": {"ubuntu22.04": "a.osb"}},
            UsageError,
            "is for debian12, and the inventory names it for ubuntu22.04",
        ),
        ({"bundle": {"rocky9": "a.osb"}}, UsageError, "is for debian12"),
        ({"bundle": {}}, UsageError, "needs a bundle of packages"),
        ({"packages": ["chrony", "else"]}, UsageError, "a.osb has no else"),
    ],
)
def test_unsuitable_bundles(inventory, tmp_path, options, kind, message):
    make_bundle(tmp_path / "a.osb")
    inventory.path.write_text("prefix: /opt/llm/current\n")
    with pytest.raises(kind) as error:
        choices(inventory, **options)
    assert message in str(error.value)


def test_two_bundles_for_one_release_are_refused(inventory, tmp_path):
    make_bundle(tmp_path / "a.osb")
    make_bundle(tmp_path / "b.osb")
    with pytest.raises(UsageError, match="are both for debian12-amd64") as error:
        choices(inventory)
    assert "bundle: FILE" in error.value.hint


def test_missing_bundle_names_the_command_that_writes_one(inventory):
    with pytest.raises(UsageError, match="needs a bundle") as error:
        choices(inventory)
    assert "clusterctl pack-os --release" in error.value.hint


def test_a_bundle_that_is_replaced_is_read_again(inventory, tmp_path):
    make_bundle(tmp_path / "a.osb", packages=("chrony",))
    assert choices(inventory)[0].packages == ("chrony",)
    make_bundle(tmp_path / "a.osb", packages=("chrony", "opensm", "tree"))
    assert choices(inventory)[0].packages == ("chrony", "opensm", "tree")


def test_invalid_options_are_found_without_asking_nodes(inventory):
    options = service.Options(bundle={"rocky9": "a.osb", "hurd": "b.osb"}, packages=["$(reboot)"], replace=["a b"])
    found = dict.fromkeys(key for key, _ in service.problems(options, inventory))
    assert list(found) == ["bundle", "packages", "replace"]
    assert any("rpm" in sentence for _, sentence in service.problems(options, inventory))
    with pytest.raises(ValidationError, match="bundel"):
        service.Options(bundel="x")


def test_the_index_goes_to_the_nodes_without_the_packages(inventory, tmp_path):
    make_bundle(tmp_path / "a.osb")
    make_bundle(tmp_path / "b.osb", "ubuntu22.04")
    with tarfile.open(fileobj=io.BytesIO(node.index(choices(inventory)))) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}
    assert files == {
        "debian12-amd64/Packages": b"index of debian12",
        "debian12-amd64/Release": b"release",
        "ubuntu22.04-amd64/Packages": b"index of ubuntu22.04",
        "ubuntu22.04-amd64/Release": b"release",
    }


def test_parts_are_the_bundle(inventory, tmp_path, monkeypatch):
    path = make_bundle(tmp_path / "a.osb")
    monkeypatch.setattr(node, "RANGE", 1000)
    parts = node.parts(choices(inventory)[0])
    assert b"".join(b"".join(part.blocks()) for part in parts) == path.read_bytes()
    assert [part.offset for part in parts] == list(range(0, path.stat().st_size, 1000))
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(ClusterctlError, match="changed while it was sent"):
        b"".join(parts[-1].blocks())


LACKS = "name debian12-amd64\nlacks chrony opensm\n"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("present\n", ""),
        (LACKS + "new chrony\nnew opensm\nupgrade perl-base 5.36.0-7 5.36.0-8\nfree 99999999999\n", ""),
        (LACKS + "remove systemd-timesyncd\nfree 99999999999\n", ""),
        (LACKS + "holder 12 unattended-upgr\nfree 99999999999\n", ""),
        (
            "refused there is no bundle for rocky9-amd64, only for debian12-amd64\n",
            "there is no bundle for rocky9-amd64",
        ),
        (LACKS + "broken man-db\n", "dpkg was interrupted: man-db half installed; run there: dpkg --configure -a"),
        (
            LACKS + "remove ntpsec\nremove systemd-timesyncd\n",
            "would remove ntpsec; to allow it, write `replace: [ntpsec]`",
        ),
        (LACKS + "downgrade libc6 2.36-9 2.36-8\n", "would downgrade libc6; pack the bundle again"),
        (LACKS + "unmet chrony : Depends: libc6 (>= 3)\nerror Unable to correct problems\n", "libc6 (>= 3)"),
        (LACKS + "error Unable to locate package opensm\n", "Unable to locate package opensm"),
        (LACKS + "new chrony\nfree 1000\n", "0 MB free, 0 MB are needed; free some space"),
    ],
)
def test_answers_of_nodes_are_judged(inventory, tmp_path, message, why):
    make_bundle(tmp_path / "a.osb")
    chosen = choices(inventory)
    judged = node.judge(node.read(message), chosen, service.Options().replace)
    assert (why in judged) if why else judged == ""


def test_a_service_has_one_step_a_node(inventory, tmp_path):
    make_bundle(tmp_path / "a.osb")
    options = service.Options()
    for duties in (service.plan(options, inventory), service.verify(options, inventory)):
        assert [(duty.node, duty.stage, len(duty.steps)) for duty in duties] == [("node01", "base", 1)]
