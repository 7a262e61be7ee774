# ===== apply, stage serve: gpu01
# --- nfs: installed
# unless
cc_service=nfs
command -v exportfs && command -v rpc.nfsd
# do
cc_service=nfs
cc_say 'nfs-kernel-server is not installed: add it with services: os_packages:, or by hand'
false
# --- nfs: running
# unless
cc_service=nfs
cc_on nfs-server.service
# do
cc_service=nfs
cc_start nfs-server.service
# --- nfs: threads
# unless
cc_service=nfs
if [ -d /etc/nfs.conf.d ]; then
cc_is /etc/nfs.conf.d/clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo nfs` removes it.
[nfsd]
threads=64
'
else
cc_has_block /etc/default/nfs-kernel-server nfs 'RPCNFSDCOUNT=64
'
fi
[ "$(cat /proc/fs/nfsd/threads)" = 64 ]
# do
cc_service=nfs
cc_journal threads rpc.nfsd "$(cat /proc/fs/nfsd/threads)"
if [ -d /etc/nfs.conf.d ]; then
cc_stage /etc/nfs.conf.d/clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo nfs` removes it.
[nfsd]
threads=64
'
cc_commit /etc/nfs.conf.d/clusterctl.conf
cc_done /etc/nfs.conf.d/clusterctl.conf
else
cc_block /etc/default/nfs-kernel-server nfs 'RPCNFSDCOUNT=64
' end
cc_block_done /etc/default/nfs-kernel-server nfs
fi
rpc.nfsd 64
# --- nfs: folder /srv/share
# unless
cc_service=nfs
[ -d /srv/share ]
# do
cc_service=nfs
cc_folder /srv/share 1777
# --- nfs: folder for tokens in /srv/share
# unless
cc_service=nfs
[ -d /srv/share/.clusterctl ]
# do
cc_service=nfs
cc_folder /srv/share/.clusterctl 1777
# --- nfs: token in /srv/share
# unless
cc_service=nfs
cc_is /srv/share/.clusterctl/server 644 'gpu01:/srv/share
'
# do
cc_service=nfs
cc_stage /srv/share/.clusterctl/server 644 'gpu01:/srv/share
'
cc_commit /srv/share/.clusterctl/server
cc_done /srv/share/.clusterctl/server
# --- nfs: exports
# unless
cc_service=nfs
cc_is /etc/exports.d/clusterctl.exports 644 '# Written by clusterctl; `clusterctl services undo nfs` removes it.
/srv/share 10.1.0.2(rw,sync,no_subtree_check,root_squash)
/srv/share 10.0.0.2(rw,sync,no_subtree_check,root_squash)
/srv/share 10.1.0.3(rw,sync,no_subtree_check,root_squash)
/srv/share 10.0.0.3(rw,sync,no_subtree_check,root_squash)
'
# do
cc_service=nfs
cc_journal reexport exportfs -ra
cc_stage /etc/exports.d/clusterctl.exports 644 '# Written by clusterctl; `clusterctl services undo nfs` removes it.
/srv/share 10.1.0.2(rw,sync,no_subtree_check,root_squash)
/srv/share 10.0.0.2(rw,sync,no_subtree_check,root_squash)
/srv/share 10.1.0.3(rw,sync,no_subtree_check,root_squash)
/srv/share 10.0.0.3(rw,sync,no_subtree_check,root_squash)
'
# exportfs itself checks the new file, with private tables in a private mount namespace, so nothing it writes is
# visible outside. It fails for a line that it does not understand and for a folder that cannot be exported.
cc_try='set -e
mount -t tmpfs clusterctl /var/lib/nfs
cp "$1" /var/lib/nfs/new.exports
: >/var/lib/nfs/etab
[ ! -e /etc/exports ] || mount --bind /dev/null /etc/exports
mount -t tmpfs clusterctl /etc/exports.d
cp /var/lib/nfs/new.exports /etc/exports.d
exportfs -ra'
unshare --mount sh -c "$cc_try" sh "$cc_new"

cc_commit /etc/exports.d/clusterctl.exports
exportfs -ra
cc_done /etc/exports.d/clusterctl.exports
# --- nfs: exported
# unless
cc_service=nfs
# mountd answers from etab: a line for each folder and client.
systemctl is-active -q nfs-server.service || { cc_say "nfs-server.service is not running"; exit 1; }
for cc_p in /srv/share; do
  cc_n=$(awk -v p="$cc_p" '$1 == p { n++ } END { print n + 0 }' /var/lib/nfs/etab)
  [ "$cc_n" -ge 4 ] || { cc_say "$cc_p is exported to $cc_n addresses, not to every client"; exit 1; }
done

# do
cc_service=nfs
exportfs -ra
# mountd answers from etab: a line for each folder and client.
systemctl is-active -q nfs-server.service || { cc_say "nfs-server.service is not running"; exit 1; }
for cc_p in /srv/share; do
  cc_n=$(awk -v p="$cc_p" '$1 == p { n++ } END { print n + 0 }' /var/lib/nfs/etab)
  [ "$cc_n" -ge 4 ] || { cc_say "$cc_p is exported to $cc_n addresses, not to every client"; exit 1; }
done
# ===== apply, stage follow: gpu02 gpu03
# --- nfs: installed
# unless
cc_service=nfs
command -v mount.nfs
# do
cc_service=nfs
cc_say 'nfs-common is not installed: add it with services: os_packages:, or by hand'
false
# --- nfs: mount point /srv/share
# unless
cc_service=nfs
cc_path=/srv/share cc_source=10.1.0.1:/srv/share
# The last line wins: an automount is listed before its mount. Reading this file asks no server.
cc_look() { awk -v p="$cc_path" '$2 == p { m = $3 " " $1 } END { print m }' /proc/mounts; }
cc_ours() { case $cc_mounted in "nfs $cc_source" | "nfs4 $cc_source") ;; *) return 1 ;; esac; }
cc_mounted=$(cc_look)
# Lines of fstab for the folder that clusterctl did not write.
cc_foreign() { cc_rest /etc/fstab nfs | awk -v p="$cc_path" '$1 !~ /^#/ && $2 == p { print; f = 1 } END { exit !f }'; }
# The mount would hide no files, and no other program mounts there.
cc_free() {
  ! cc_foreign >/dev/null || return 1
  case $cc_mounted in
    "") [ -d "$cc_path" ] && [ -z "$(ls -A "$cc_path")" ] ;;
    "autofs systemd-1") ;;
    *) cc_ours ;;
  esac
}
cc_free
# do
cc_service=nfs
cc_path=/srv/share cc_source=10.1.0.1:/srv/share
# The last line wins: an automount is listed before its mount. Reading this file asks no server.
cc_look() { awk -v p="$cc_path" '$2 == p { m = $3 " " $1 } END { print m }' /proc/mounts; }
cc_ours() { case $cc_mounted in "nfs $cc_source" | "nfs4 $cc_source") ;; *) return 1 ;; esac; }
cc_mounted=$(cc_look)
# Lines of fstab for the folder that clusterctl did not write.
cc_foreign() { cc_rest /etc/fstab nfs | awk -v p="$cc_path" '$1 !~ /^#/ && $2 == p { print; f = 1 } END { exit !f }'; }
# The mount would hide no files, and no other program mounts there.
cc_free() {
  ! cc_foreign >/dev/null || return 1
  case $cc_mounted in
    "") [ -d "$cc_path" ] && [ -z "$(ls -A "$cc_path")" ] ;;
    "autofs systemd-1") ;;
    *) cc_ours ;;
  esac
}
cc_server=gpu01
if cc_line=$(cc_foreign); then
  cc_say "/etc/fstab has a line for $cc_path that is not clusterctl's: $cc_line"
  cc_say "remove it (and unmount the folder) if $cc_server is to serve it"
  exit 1
fi
if [ -n "$cc_mounted" ]; then
  cc_say "$cc_path is already a mount of ${cc_mounted#* } (${cc_mounted%% *}): unmount it if $cc_server is to serve it"
  exit 1
fi
if [ -d "$cc_path" ] && [ -n "$(ls -A "$cc_path")" ]; then
  cc_say "$cc_path is not empty, and a mount would hide its files: $(ls -A "$cc_path" | head -n 3 | tr '\n' ' ')..."
  cc_say "move them to $cc_server or elsewhere"
  exit 1
fi
cc_folder "$cc_path" 755
# --- nfs: mounts of every boot
# unless
cc_service=nfs
# nconnect needs Linux 5.3; an older kernel refuses the mount.
cc_kernel=$(uname -r)
cc_minor=${cc_kernel#*.}
cc_options=hard,rsize=1048576,wsize=1048576,noatime,_netdev,nofail
if [ "${cc_kernel%%.*}" -gt 5 ] || { [ "${cc_kernel%%.*}" -eq 5 ] && [ "${cc_minor%%[!0-9]*}" -ge 3 ]; }; then
  cc_options=$cc_options,nconnect=8
fi
cc_options=$cc_options,bg
cc_lines=
cc_lines="$cc_lines"10.1.0.1:/srv/share' '/srv/share" nfs $cc_options 0 0
"

cc_has_block /etc/fstab nfs "$cc_lines"
# do
cc_service=nfs
cc_journal daemon-reload systemctl daemon-reload
# nconnect needs Linux 5.3; an older kernel refuses the mount.
cc_kernel=$(uname -r)
cc_minor=${cc_kernel#*.}
cc_options=hard,rsize=1048576,wsize=1048576,noatime,_netdev,nofail
if [ "${cc_kernel%%.*}" -gt 5 ] || { [ "${cc_kernel%%.*}" -eq 5 ] && [ "${cc_minor%%[!0-9]*}" -ge 3 ]; }; then
  cc_options=$cc_options,nconnect=8
fi
cc_options=$cc_options,bg
cc_lines=
cc_lines="$cc_lines"10.1.0.1:/srv/share' '/srv/share" nfs $cc_options 0 0
"

cc_block /etc/fstab nfs "$cc_lines" end
systemctl daemon-reload
cc_block_done /etc/fstab nfs
# --- nfs: /srv/share mounted
# unless
cc_service=nfs
cc_path=/srv/share cc_source=10.1.0.1:/srv/share
# The last line wins: an automount is listed before its mount. Reading this file asks no server.
cc_look() { awk -v p="$cc_path" '$2 == p { m = $3 " " $1 } END { print m }' /proc/mounts; }
cc_ours() { case $cc_mounted in "nfs $cc_source" | "nfs4 $cc_source") ;; *) return 1 ;; esac; }
cc_mounted=$(cc_look)
# A dead server blocks every process that reads from it; on hard mounts only SIGKILL ends the wait.
cc_ask() { timeout -s KILL "$@"; }
# The mount is clusterctl's and answers. Look into an automount first, which mounts it.
cc_alive() {
  case $cc_mounted in
    "autofs systemd-1") cc_ask 30 ls "$cc_path/." >/dev/null && cc_mounted=$(cc_look) ;;
  esac
  cc_ours && cc_ask 10 stat -f "$cc_path" >/dev/null
}
cc_alive
# do
cc_service=nfs
cc_path=/srv/share cc_source=10.1.0.1:/srv/share
# The last line wins: an automount is listed before its mount. Reading this file asks no server.
cc_look() { awk -v p="$cc_path" '$2 == p { m = $3 " " $1 } END { print m }' /proc/mounts; }
cc_ours() { case $cc_mounted in "nfs $cc_source" | "nfs4 $cc_source") ;; *) return 1 ;; esac; }
cc_mounted=$(cc_look)
# A dead server blocks every process that reads from it; on hard mounts only SIGKILL ends the wait.
cc_ask() { timeout -s KILL "$@"; }
# The mount is clusterctl's and answers. Look into an automount first, which mounts it.
cc_alive() {
  case $cc_mounted in
    "autofs systemd-1") cc_ask 30 ls "$cc_path/." >/dev/null && cc_mounted=$(cc_look) ;;
  esac
  cc_ours && cc_ask 10 stat -f "$cc_path" >/dev/null
}
cc_undo='u=$(systemd-escape -p --suffix=automount "$1")
systemctl stop "$u" 2>/dev/null || :
while awk -v p="$1" '\''$2 == p { f = 1 } END { exit !f }'\'' /proc/mounts; do
  timeout -s KILL 60 umount "$1" || { echo "$1 cannot be unmounted: end the processes that use it, or run: umount -l $1" >&2; exit 1; }
done
'
cc_server=gpu01
cc_hint="Is $cc_server up, its nfs-server.service, and its TCP port 2049 open?"
if cc_ours; then
  cc_say "$cc_path hangs: $cc_server has not answered for 10 s. $cc_hint"
  exit 1
fi
cc_journal "mount $cc_path" sh -c "$cc_undo" sh "$cc_path"
# In the foreground and once, because the user waits for the answer. At boot, systemd retries.
cc_ask 60 mount -o fg,retry=0 "$cc_path"
cc_mounted=$(cc_look)
if ! cc_alive; then
  cc_say "$cc_path is not mounted. $cc_hint"
  exit 1
fi
# ===== verify, stage serve: gpu01
# --- nfs: serves
# unless
cc_service=nfs
# mountd answers from etab: a line for each folder and client.
systemctl is-active -q nfs-server.service || { cc_say "nfs-server.service is not running"; exit 1; }
for cc_p in /srv/share; do
  cc_n=$(awk -v p="$cc_p" '$1 == p { n++ } END { print n + 0 }' /var/lib/nfs/etab)
  [ "$cc_n" -ge 4 ] || { cc_say "$cc_p is exported to $cc_n addresses, not to every client"; exit 1; }
done

# do
cc_service=nfs
# mountd answers from etab: a line for each folder and client.
systemctl is-active -q nfs-server.service || { cc_say "nfs-server.service is not running"; exit 1; }
for cc_p in /srv/share; do
  cc_n=$(awk -v p="$cc_p" '$1 == p { n++ } END { print n + 0 }' /var/lib/nfs/etab)
  [ "$cc_n" -ge 4 ] || { cc_say "$cc_p is exported to $cc_n addresses, not to every client"; exit 1; }
done
# ===== verify, stage follow: gpu02 gpu03
# --- nfs: /srv/share is fresh
# unless
cc_service=nfs
cc_path=/srv/share cc_source=10.1.0.1:/srv/share
# The last line wins: an automount is listed before its mount. Reading this file asks no server.
cc_look() { awk -v p="$cc_path" '$2 == p { m = $3 " " $1 } END { print m }' /proc/mounts; }
cc_ours() { case $cc_mounted in "nfs $cc_source" | "nfs4 $cc_source") ;; *) return 1 ;; esac; }
cc_mounted=$(cc_look)
# A dead server blocks every process that reads from it; on hard mounts only SIGKILL ends the wait.
cc_ask() { timeout -s KILL "$@"; }
# The mount is clusterctl's and answers. Look into an automount first, which mounts it.
cc_alive() {
  case $cc_mounted in
    "autofs systemd-1") cc_ask 30 ls "$cc_path/." >/dev/null && cc_mounted=$(cc_look) ;;
  esac
  cc_ours && cc_ask 10 stat -f "$cc_path" >/dev/null
}
cc_alive
# The server's token: the mount shows the same folder that the server exports.
cc_want='gpu01:/srv/share
'
[ "$(cc_ask 10 cat "$cc_path/.clusterctl/server"; echo x)" = "$cc_want"x ]
# clusterctl's token, written as the ssh user and read through a second, independent mount. The time limits are inside
# su, which gives its child a new session.
cc_user=${SUDO_USER:-root}
cc_token=$(cat /proc/sys/kernel/random/uuid)
cc_new=$cc_path/.clusterctl/$cc_token
cc_other=$(mktemp -d)
cc_write='umask 022; echo "$1" | timeout -s KILL 10 tee "$0" >/dev/null'
cc_read='mount -t nfs -o ro,nosharecache,retry=0 "$1" "$2" && cat "$2/.clusterctl/$3"'
su -s /bin/sh "$cc_user" -c "$cc_write" "$cc_new" "$cc_token"
cc_seen=$(cc_ask 30 unshare --mount sh -c "$cc_read" sh "$cc_source" "$cc_other" "$cc_token") || :
rmdir "$cc_other"
su -s /bin/sh "$cc_user" -c 'timeout -s KILL 10 rm -f "$0"' "$cc_new"
[ "$cc_seen" = "$cc_token" ]

# do
cc_service=nfs
cc_path=/srv/share cc_source=10.1.0.1:/srv/share
# The last line wins: an automount is listed before its mount. Reading this file asks no server.
cc_look() { awk -v p="$cc_path" '$2 == p { m = $3 " " $1 } END { print m }' /proc/mounts; }
cc_ours() { case $cc_mounted in "nfs $cc_source" | "nfs4 $cc_source") ;; *) return 1 ;; esac; }
cc_mounted=$(cc_look)
# A dead server blocks every process that reads from it; on hard mounts only SIGKILL ends the wait.
cc_ask() { timeout -s KILL "$@"; }
# The mount is clusterctl's and answers. Look into an automount first, which mounts it.
cc_alive() {
  case $cc_mounted in
    "autofs systemd-1") cc_ask 30 ls "$cc_path/." >/dev/null && cc_mounted=$(cc_look) ;;
  esac
  cc_ours && cc_ask 10 stat -f "$cc_path" >/dev/null
}
cc_server=gpu01 cc_user=${SUDO_USER:-root}
cc_hint="Is $cc_server up, its nfs-server.service, and its TCP port 2049 open?"
case $cc_mounted in
  "") echo "$cc_path is not mounted: files written there stay on this node's disk" ;;
  "autofs systemd-1") echo "$cc_path is not mounted on access. $cc_hint" ;;
  *)
    if ! cc_ours; then
      echo "$cc_path is mounted from ${cc_mounted#* }, not from $cc_source"
    elif ! cc_ask 5 stat -f "$cc_path" >/dev/null; then
      echo "$cc_path hangs: $cc_server has not answered for 5 s. $cc_hint"
    else
      su -s /bin/sh "$cc_user" -c 'echo | timeout -s KILL 5 tee "$0" && rm -f "$0"' "$cc_path/.clusterctl/of-$$" || :
      echo "$cc_path: a token that $cc_user writes there does not reach $cc_server"
    fi
    ;;
esac
false
