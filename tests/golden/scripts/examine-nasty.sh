# Prints what a deploy needs to know about this node. Read-only.
fact() { printf 'fact %s=%s\n' "$1" "$2"; }
prefix='/opt/it'\''s $(id) "x"/current'
root='/opt/it'\''s $(id) "x"'
release=0123456789ab

fact machine "$(uname -m)"
fact glibc "$(getconf GNU_LIBC_VERSION 2>/dev/null)"
fact user "$(id -un 2>/dev/null || id -u)"
for tool in tar zstd sha256sum ssh; do
    if command -v "$tool" >/dev/null 2>&1; then fact "tool.$tool" yes; else fact "tool.$tool" no; fi
done

if [ -L "$prefix" ]; then
    fact prefix.link "$(readlink "$prefix")"
elif [ -e "$prefix" ]; then
    fact prefix.other yes
fi
if [ -e "$root/releases" ] && [ ! -e "$root/releases/.clusterctl" ] && [ -n "$(ls -A "$root/releases" 2>&1)" ]; then
    fact releases.foreign yes
fi
# With leftovers of an interrupted deploy it is incomplete: the last step of a deploy removes them.
left=
for path in "$root/releases/.transfer-$release" "$root/releases/.removing-$release"; do
    [ ! -e "$path" ] || left=yes
done
if [ -z "$left" ] && [ -e "$root/releases/$release.ok" ] && [ -d "$root/releases/$release" ]; then
    fact release complete
elif [ -d "$root/releases/$release" ]; then
    fact release unpacked
else
    fact release absent
fi
others=0
for mark in "$root"/releases/*.ok; do
    case $mark in */"$release.ok" | */'*.ok') ;; *) others=$((others + 1)) ;; esac
done
fact others "$others"
for path in "$root"/releases/.incoming-*; do
    [ ! -d "$path" ] || fact begun yes
done
# Leftovers of a killed command's relay.
# The home folder that sshd uses, which may differ from HOME.
user=$(id -un 2>/dev/null) || user=
home=$(getent passwd "$user" 2>/dev/null) || home=:$HOME:
home=${home%:*}
home=${home##*:}
case $(cat -- "$home/.ssh/authorized_keys" 2>/dev/null) in *clusterctl-relay:0123:*) fact relay.left yes ;; esac

# The nearest existing folder decides whether it is writable and how much space is free.
base=$root
[ -d "$root/releases" ] && base=$root/releases
while [ ! -e "$base" ]; do base=$(dirname -- "$base"); done
fact base "$base"
if [ -d "$base" ] && [ -w "$base" ] && [ -x "$base" ]; then fact writable yes; else fact writable no; fi
# proc_pid_mounts(5): device, mount point with octal escapes, type, options. The longest matching mount point applies.
real=$(cd -- "$base" 2>/dev/null && pwd -P)
longest=
noexec=no
while read -r _ point _ options _; do
    point=$(printf %b "$point")
    case $real/ in "${point%/}/"*) ;; *) continue ;; esac
    case $point in "$longest"*) ;; *) continue ;; esac # the deeper of two mount points starts with the other
    longest=$point
    case ,$options, in *,noexec,*) noexec=yes ;; *) noexec=no ;; esac
done </proc/self/mounts
if [ "$noexec" = yes ]; then fact noexec yes; fi
# This user's free blocks, block size, total inodes, free inodes: the same in coreutils and busybox.
space=$(stat -f -c '%a %S %c %d' -- "$base" 2>/dev/null) && {
    # shellcheck disable=SC2086 # four numbers
    set -- $space
    fact free_bytes "$(($1 * $2))"
    [ "$3" -eq 0 ] || fact free_inodes "$4"
}
fact end yes
