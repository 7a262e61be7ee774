# ===== apply, stage base: gpu01 gpu02 gpu03
# --- sysctl: settings of every boot
# unless
cc_service=sysctl
cc_is /etc/sysctl.d/99-zz-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo sysctl` removes it.
net.core.rmem_max = 67108864
net.ipv4.tcp_rmem = 4096 131072 67108864
vm.overcommit_memory = 1
'
# do
cc_service=sysctl
cc_stage /etc/sysctl.d/99-zz-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo sysctl` removes it.
net.core.rmem_max = 67108864
net.ipv4.tcp_rmem = 4096 131072 67108864
vm.overcommit_memory = 1
'
cc_commit /etc/sysctl.d/99-zz-clusterctl.conf
cc_done /etc/sysctl.d/99-zz-clusterctl.conf
# --- sysctl: net.core.rmem_max now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 67108864 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no net.core.rmem_max"; exit 1; }
cc_journal 'now net.core.rmem_max' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/net/core/rmem_max
printf '%s\n' 67108864 >/proc/sys/net/core/rmem_max
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 67108864 ] || { cc_say "the kernel took $cc_now for net.core.rmem_max, not 67108864"; exit 1; }
# --- sysctl: net.ipv4.tcp_rmem now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 131072 67108864' ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no net.ipv4.tcp_rmem"; exit 1; }
cc_journal 'now net.ipv4.tcp_rmem' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/net/ipv4/tcp_rmem
printf '%s\n' '4096 131072 67108864' >/proc/sys/net/ipv4/tcp_rmem
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 131072 67108864' ] || { cc_say "the kernel took $cc_now for net.ipv4.tcp_rmem, not 4096 131072 67108864"; exit 1; }
# --- sysctl: vm.overcommit_memory now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/vm/overcommit_memory 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 1 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/vm/overcommit_memory 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no vm.overcommit_memory"; exit 1; }
cc_journal 'now vm.overcommit_memory' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/vm/overcommit_memory
printf '%s\n' 1 >/proc/sys/vm/overcommit_memory
cc_now=$(cat /proc/sys/vm/overcommit_memory 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 1 ] || { cc_say "the kernel took $cc_now for vm.overcommit_memory, not 1"; exit 1; }
# ===== verify, stage base: gpu01 gpu02 gpu03
# --- sysctl: net.core.rmem_max
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 67108864 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
cc_say "net.core.rmem_max is ${cc_now:-unknown to this kernel}, not 67108864: see sysctl --system"
false
# --- sysctl: net.ipv4.tcp_rmem
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 131072 67108864' ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
cc_say "net.ipv4.tcp_rmem is ${cc_now:-unknown to this kernel}, not 4096 131072 67108864: see sysctl --system"
false
# --- sysctl: vm.overcommit_memory
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/vm/overcommit_memory 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 1 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/vm/overcommit_memory 2>/dev/null | tr '\t' ' ')
cc_say "vm.overcommit_memory is ${cc_now:-unknown to this kernel}, not 1: see sysctl --system"
false
