"""Undo of OS packages, when no other test needs them any more: what gave way to chrony is back, and at work."""


def test_undo_removes_installed_packages_and_reinstalls_removed_ones(lab, clusterctl, chronyd):
    lab.inventory("os_packages: {}")
    done = clusterctl("services", "undo", "os_packages", "--limit", lab.client.name, "--deadline", 1500)
    assert "undone" in done.stdout
    assert lab.client.out("dpkg-query -W -f '${db:Status-Status}' chrony 2>/dev/null || :") in ("", "not-installed")
    assert lab.client.out("dpkg --verify systemd-timesyncd; dpkg --audit") == ""  # its files as they were packed
    versions = lab.client.out("dpkg-query -W -f '${Version}\\n' systemd systemd-timesyncd").split()
    assert len(set(versions)) == 1
    assert lab.client.out("systemctl is-enabled systemd-timesyncd; systemctl is-active systemd-timesyncd").split() == [
        "enabled",
        "active",
    ]
