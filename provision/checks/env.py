"""The packed environment: the simple checks."""

from provision.checks.kit import Answer, Judgement, each_node, fail, ok, pairs, unread
from provision.checks.kit.mounts import mount_of, mounts


@each_node(
    "env.noexec",
    "compiled kernels can be loaded from /tmp",
    probe='cat /proc/self/mounts\necho "real $(readlink -f /tmp)"\n',
    why=(
        "Triton's and Inductor's kernels do not load: 'failed to map segment from shared object', minutes into the run."
    ),
)
def noexec(answer: Answer) -> Judgement:
    """FAIL for a mount with noexec.

    Compiled kernels and their launchers are shared libraries in caches below /tmp (``clusterctl train``) or in the
    home. A file system mounted ``noexec`` refuses to map them (mount(8)). The releases' own folder: the check
    fs.noexec.
    """
    mount = mount_of(mounts(answer), pairs(answer).get("real", ""))
    if mount is None:
        return unread(answer)
    if "noexec" in mount.options:
        fix = f"mount -o remount,exec {mount.target} (and in /etc/fstab), or set TRITON_CACHE_DIR in train.env"
        return fail(f"{mount.target} is mounted noexec", expected="exec", fix=fix)
    return ok(f"{mount.target} allows it")
