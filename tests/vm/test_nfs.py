"""Kernel NFS between two machines, set up by the command: exported, mounted, used, rebooted, hung, refused, undone.

The file system in RAM of the service tmpfs is beside it, since a reboot of these machines takes long.
"""

import json
import re

import pytest

from trainer.agent.contract.plan import RAM

# All files in /etc: content, mode, owner, kind and targets of links.
ETC = 'cd / && { find etc -type f -exec sha256sum {} +; find etc -printf "%p %m %u %g %y %l\\n"; } | sort'
SHARE = "/data"
SERVICES = f"nfs: {{exports: [{SHARE}], threads: 16, connections: 4}}\ntmpfs: {{size: 96M}}"
# Asks no server: the table lists the mounts, also if no server answers.
MOUNTED = f"awk '$2 == \"{SHARE}\" {{ print $3, $1, $4 }}' /proc/mounts"


@pytest.fixture(scope="module")
def before(lab):
    """What lay in /etc on both machines before anything was applied."""
    return [machine.out(ETC) for machine in lab.machines]


@pytest.fixture(scope="module")
def shared(lab, before, clusterctl):
    """The share, exported by vm1 and mounted by vm2."""
    lab.inventory(SERVICES)
    return json.loads(clusterctl("services", "apply", "--json").stdout)


def states(done, machine):
    return {step["name"]: step["state"] for step in json.loads(done.stdout)["nodes"][machine.name]["steps"]}


def test_mount_point_with_files_is_refused(lab, before, clusterctl):
    lab.inventory(SERVICES)
    lab.client.run(f"mkdir {SHARE} && touch {SHARE}/mine")
    done = clusterctl("services", "apply", code=5)
    assert re.search(r"vm2:\s+nfs: mount point /data: /data is not empty.*mine", done.stderr), done.stderr
    assert lab.client.out(f"{MOUNTED}; grep -c 'clusterctl nfs' /etc/fstab || :") == "0"
    lab.client.run(f"rm -r {SHARE}")


def test_share_is_mounted_and_both_sides_read_and_write(lab, shared):
    kind, source, options = lab.client.out(MOUNTED).split()
    assert (kind, source) == ("nfs4", f"{lab.head.address}:{SHARE}")
    assert {"hard", "nconnect=4", "noatime"} <= set(options.split(","))
    assert lab.head.out("cat /proc/fs/nfsd/threads") == "16"
    lab.client.run(f"echo from the client >{SHARE}/a", user="train")
    lab.head.run(f"grep -qx 'from the client' {SHARE}/a && stat -c %U {SHARE}/a | grep -qx train", user="train")
    lab.head.run(f"echo from the server >{SHARE}/b", user="train")
    lab.client.run(f"grep -qx 'from the server' {SHARE}/b", user="train")
    # root of a client is the user nobody on the server
    assert lab.client.out(f": >{SHARE}/c; stat -c %U {SHARE}/c") == "nobody"


def test_a_second_apply_changes_nothing(lab, shared, clusterctl):
    done = clusterctl("services", "apply", "--json")
    assert {*states(done, lab.head).values(), *states(done, lab.client).values()} == {"ok"}


def test_client_boots_without_its_server_and_mounts_the_share_later(lab, shared):
    with lab.head.frozen():
        lab.client.power_cycle()
        lab.client.wait_reached()
        assert lab.client.out(f"systemctl is-system-running; {MOUNTED}") == "starting"
        # Meanwhile no checkpoint is written to the local disk.
        assert lab.client.run(f": >{SHARE}/lost", user="train", check=False).returncode
    lab.client.wait_up()
    assert lab.client.out(f"{MOUNTED} | cut -d' ' -f1; cat {SHARE}/b") == "nfs4\nfrom the server"


def test_file_system_in_ram_has_huge_pages_after_a_reboot(lab, shared):
    """systemd mounts it from /etc/fstab, and makes its folder in the new /run."""
    kind, options = lab.client.out(f"awk '$2 == \"{RAM}\" {{ print $3, $4 }}' /proc/mounts").split()
    assert kind == "tmpfs"
    assert {"nosuid", "nodev", "huge=always", "size=98304k"} <= set(options.split(","))
    huge = "sed -n 's/^ShmemHugePages: *//p' /proc/meminfo"
    lab.client.run(f"head -c 33554432 /dev/zero >{RAM}/checkpoint", user="train")
    pages = lab.client.out(huge)
    lab.client.run(f"rm {RAM}/checkpoint", user="train")
    assert int(pages.split()[0]) >= 8192, pages  # kB; the rest may be too fragmented on a small machine


def test_mount_survives_a_reboot_of_the_server(lab, shared):
    lab.head.reboot()
    assert lab.head.out("cat /proc/fs/nfsd/threads") == "16"
    assert lab.client.out(f"echo again >>{SHARE}/a; cat {SHARE}/a", user="train") == "from the client\nagain"


def test_unmounted_share_on_the_local_disk_is_found(lab, shared, clusterctl):
    lab.client.run(f"umount {SHARE}")
    done = clusterctl("services", "verify", "--limit", lab.client.name, code=5)
    assert "/data is not mounted: files written there stay on this node's disk" in done.stdout + done.stderr
    lab.client.run(f"mount {SHARE}")


def test_hung_mount_is_named_after_its_deadline(lab, shared, clusterctl):
    with lab.head.frozen():
        done = clusterctl("services", "verify", "--limit", lab.client.name, code=5)
    assert "/data hangs: vm1 has not answered" in done.stdout + done.stderr
    assert "works" in clusterctl("services", "verify").stdout


def test_undo_restores_every_file(lab, before, shared, clusterctl):
    lab.client.run(f"rm {SHARE}/[ab]; sudo rm {SHARE}/c", user="train")
    clusterctl("services", "undo", "nfs", "tmpfs")
    for machine, was in zip(lab.machines, before, strict=True):
        assert machine.out(ETC) == was
        assert machine.out(f"ls -d {SHARE} 2>&1 || :").endswith("No such file or directory")
    assert lab.client.out(f"{MOUNTED}; grep -c {RAM} /proc/mounts || :") == "0"
    assert lab.head.out("cat /proc/fs/nfsd/threads; exportfs -s; systemctl is-active nfs-server") == "8\nactive"
