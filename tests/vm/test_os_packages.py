"""OS packages from an offline bundle on machines with systemd that have no route to anywhere; ``train`` may sudo.

What is installed here stays, since other services need it; ``test_os_packages_undo`` comes last.
"""

HOST = "find /etc/apt /usr/sbin/policy-rc.d -type f -exec sha256sum {} + 2>/dev/null | sort; ls /var/lib/apt/lists"
APPLY = ("services", "apply", "os_packages", "--deadline", 1500)  # seconds; an emulated machine may get no processor


def test_packages_are_installed_offline_and_the_daemon_waits_for_its_configuration(lab, clusterctl, bundle):
    lab.inventory(f"os_packages: {{bundle: {bundle.name}}}")
    before = lab.client.out(HOST)
    assert lab.client.out("ip route show default; ip -6 route show default") == ""
    assert lab.client.out("systemctl is-active systemd-timesyncd || :") == "active"

    first = clusterctl(*APPLY)
    assert "vm[1-2]: systemd-timesyncd will be removed" in first.stderr
    assert "set up (packages)" in first.stdout
    status = "dpkg-query -W -f '${db:Status-Status} ' chrony systemd-timesyncd; systemctl is-active chrony || :"
    for machine in lab.machines:
        assert machine.out(status) == "installed config-files inactive"
    assert lab.client.out(HOST) == before
    assert "unchanged" in clusterctl(*APPLY).stdout
