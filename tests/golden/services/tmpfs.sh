# ===== apply, stage base: gpu01 gpu02 gpu03
# --- tmpfs: the folder
# unless
cc_service=tmpfs
[ -d /run/clusterctl/memory ]
# do
cc_service=tmpfs
cc_folder /run/clusterctl/memory 755
# --- tmpfs: the mount at boot
# unless
cc_service=tmpfs
cc_has_block /etc/fstab tmpfs 'tmpfs /run/clusterctl/memory tmpfs rw,nosuid,nodev,mode=1777,size=50%,huge=always,x-mount.mkdir 0 0
'
# do
cc_service=tmpfs
cc_block /etc/fstab tmpfs 'tmpfs /run/clusterctl/memory tmpfs rw,nosuid,nodev,mode=1777,size=50%,huge=always,x-mount.mkdir 0 0
' end
cc_block_done /etc/fstab tmpfs
# --- tmpfs: the mount
# unless
cc_service=tmpfs
cc_mounted=$(awk -v at=/run/clusterctl/memory '$2 == at { print $3 "," $4 "," }' /proc/mounts | tail -n 1)
case $cc_mounted in tmpfs,*,huge=always,*) true ;; *) false ;; esac
# do
cc_service=tmpfs
cc_mounted=$(awk -v at=/run/clusterctl/memory '$2 == at { print $3 "," $4 "," }' /proc/mounts | tail -n 1)
[ -z "$cc_mounted" ] || { cc_say "another file system is mounted on /run/clusterctl/memory"; exit 1; }
[ -e /sys/kernel/mm/transparent_hugepage ] || { cc_say "this kernel has no transparent huge pages (/sys/kernel/mm/transparent_hugepage)"; exit 1; }
cc_journal mount sh -c '! mountpoint -q /run/clusterctl/memory || umount /run/clusterctl/memory'
mount -t tmpfs -o rw,nosuid,nodev,mode=1777,size=50%,huge=always tmpfs /run/clusterctl/memory
# --- tmpfs: the size
# unless
cc_service=tmpfs
cc_now=$(($(stat -f -c "%b * %S" /run/clusterctl/memory)))
cc_kib=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
cc_wanted=$((cc_kib * 1024 / 100 * 50))
cc_off=$(((cc_now - cc_wanted) / 1048576))
[ $cc_off -ge -1 ] && [ $cc_off -le 1 ]
# do
cc_service=tmpfs
cc_now=$(($(stat -f -c "%b * %S" /run/clusterctl/memory)))
cc_journal /run/clusterctl/memory mount -o remount,size="$cc_now" /run/clusterctl/memory
mount -o remount,size=50% /run/clusterctl/memory
# ===== verify, stage base: gpu01 gpu02 gpu03
# --- tmpfs: users can write
# unless
cc_service=tmpfs
cc_mounted=$(awk -v at=/run/clusterctl/memory '$2 == at { print $3 "," $4 "," }' /proc/mounts | tail -n 1)
case $cc_mounted in tmpfs,*,huge=always,*) true ;; *) false ;; esac && su -s /bin/sh nobody -c 'cc_file=$(mktemp /run/clusterctl/memory/.verify.XXXXXX) && rm -f $cc_file'
# do
cc_service=tmpfs
echo "no user can write to /run/clusterctl/memory"
false
