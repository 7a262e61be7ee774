# ===== apply, stage base: gpu01 gpu02 gpu03
# --- limits: limits of a login
# unless
cc_service=limits
cc_is /etc/security/limits.d/90-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo limits` removes it.
* - memlock 65536
* - nofile 65536
root - memlock 65536
root - nofile 65536
'
# do
cc_service=limits
cc_stage /etc/security/limits.d/90-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo limits` removes it.
* - memlock 65536
* - nofile 65536
root - memlock 65536
root - nofile 65536
'
cc_commit /etc/security/limits.d/90-clusterctl.conf
cc_done /etc/security/limits.d/90-clusterctl.conf
# --- limits: size of shared memory after a reboot
# unless
cc_service=limits
cc_has_block /etc/fstab shm 'tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=50% 0 0
'
# do
cc_service=limits
cc_block /etc/fstab shm 'tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=50% 0 0
' end
cc_block_done /etc/fstab shm
# --- limits: size of shared memory now
# unless
cc_service=limits
cc_now=$(($(stat -f -c "%b * %S" /dev/shm)))
cc_kib=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
cc_wanted=$((cc_kib * 1024 / 100 * 50))
cc_off=$(((cc_now - cc_wanted) / 1048576))
[ $cc_off -ge -1 ] && [ $cc_off -le 1 ]
# do
cc_service=limits
cc_now=$(($(stat -f -c "%b * %S" /dev/shm)))
cc_journal /dev/shm mount -o remount,size="$cc_now" /dev/shm
mount -o remount,size=50% /dev/shm
# ===== verify, stage base: gpu01 gpu02 gpu03
# --- limits: a login has the limits
# unless
cc_service=limits
cc_l=$(su -s /bin/sh root -c 'ulimit -l; ulimit -n' 2>/dev/null | tr '\n' ' ')
[ "${cc_l% }" = '65536 65536' ]
# do
cc_service=limits
cc_l=$(su -s /bin/sh root -c 'ulimit -l; ulimit -n' 2>/dev/null | tr '\n' ' ')
echo "a login has memlock and nofile ${cc_l% }, expected 65536 65536: check that pam reads limits.d"
false
