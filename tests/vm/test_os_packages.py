"""OS packages from an offline bundle on machines with systemd that have no route to anywhere.

What is installed here stays: the tests of the other services need it.
"""

import pytest

PACKAGES = ("chrony", "nfs-common", "nfs-kernel-server")  # the image has the last two
OPTIONS = "os_packages: {bundle: os.osb}\n"
HOST = "find /etc/apt /usr/sbin/policy-rc.d /etc/systemd/timesyncd.conf -type f -exec sha256sum {} + 2>/dev/null | sort"
INSTALLED = "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\\n'"


@pytest.fixture(scope="module")
def bundle(lab, clusterctl):
    clusterctl("pack-os", "--release", "debian12", "-o", "os.osb", *PACKAGES)
    lab.inventory(OPTIONS)


def test_packages_come_without_a_route_and_the_daemons_wait_for_their_configuration(lab, clusterctl, bundle):
    client = lab.client
    before = client.out(HOST), client.out(INSTALLED)
    assert client.out("ip route show default; ip -6 route show default") == ""
    assert "systemd-timesyncd" in before[1]

    first = clusterctl("services", "apply", "os_packages")
    assert "vm[1-2]: systemd-timesyncd gives way" in first.stderr
    assert "set up (packages)" in first.stdout
    for machine in (lab.head, client):
        assert machine.out("dpkg-query -W -f '${db:Status-Status}' chrony systemd-timesyncd") == "installedconfig-files"
        assert machine.out("systemctl is-active chrony || :").strip() == "inactive"
    assert client.out(HOST) == before[0]
    assert "unchanged" in clusterctl("services", "apply", "os_packages").stdout

    undone = clusterctl("services", "undo", "os_packages", "--limit", "vm2")
    assert "undone" in undone.stdout
    assert (client.out(HOST), client.out(INSTALLED)) == before
    assert client.out("systemctl is-enabled systemd-timesyncd").strip() == "enabled"
    assert "chrony" in lab.head.out("dpkg-query -W -f '${Package}' chrony")
    assert "set up (packages)" in clusterctl("services", "apply", "os_packages").stdout
