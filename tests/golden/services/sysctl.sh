# ===== apply, stage base: gpu01 gpu02 gpu03
# --- sysctl: settings of every boot
# unless
cc_service=sysctl
cc_is /etc/sysctl.d/99-zz-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo sysctl` removes it.
-kernel.numa_balancing = 0
net.core.rmem_max = 268435456
net.core.wmem_max = 268435456
net.ipv4.tcp_rmem = 4096 131072 268435456
net.ipv4.tcp_wmem = 4096 65536 268435456
'
# do
cc_service=sysctl
cc_stage /etc/sysctl.d/99-zz-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo sysctl` removes it.
-kernel.numa_balancing = 0
net.core.rmem_max = 268435456
net.core.wmem_max = 268435456
net.ipv4.tcp_rmem = 4096 131072 268435456
net.ipv4.tcp_wmem = 4096 65536 268435456
'
cc_commit /etc/sysctl.d/99-zz-clusterctl.conf
cc_done /etc/sysctl.d/99-zz-clusterctl.conf
# --- sysctl: kernel.numa_balancing now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/kernel/numa_balancing 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 0 ] || [ ! -e /proc/sys/kernel/numa_balancing ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/kernel/numa_balancing 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no kernel.numa_balancing"; exit 1; }
cc_journal 'now kernel.numa_balancing' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/kernel/numa_balancing
printf '%s\n' 0 >/proc/sys/kernel/numa_balancing
cc_now=$(cat /proc/sys/kernel/numa_balancing 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 0 ] || [ ! -e /proc/sys/kernel/numa_balancing ] || { cc_say "the kernel took $cc_now for kernel.numa_balancing, not 0"; exit 1; }
# --- sysctl: net.core.rmem_max now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 268435456 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no net.core.rmem_max"; exit 1; }
cc_journal 'now net.core.rmem_max' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/net/core/rmem_max
printf '%s\n' 268435456 >/proc/sys/net/core/rmem_max
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 268435456 ] || { cc_say "the kernel took $cc_now for net.core.rmem_max, not 268435456"; exit 1; }
# --- sysctl: net.core.wmem_max now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/wmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 268435456 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/wmem_max 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no net.core.wmem_max"; exit 1; }
cc_journal 'now net.core.wmem_max' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/net/core/wmem_max
printf '%s\n' 268435456 >/proc/sys/net/core/wmem_max
cc_now=$(cat /proc/sys/net/core/wmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 268435456 ] || { cc_say "the kernel took $cc_now for net.core.wmem_max, not 268435456"; exit 1; }
# --- sysctl: net.ipv4.tcp_rmem now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 131072 268435456' ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no net.ipv4.tcp_rmem"; exit 1; }
cc_journal 'now net.ipv4.tcp_rmem' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/net/ipv4/tcp_rmem
printf '%s\n' '4096 131072 268435456' >/proc/sys/net/ipv4/tcp_rmem
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 131072 268435456' ] || { cc_say "the kernel took $cc_now for net.ipv4.tcp_rmem, not 4096 131072 268435456"; exit 1; }
# --- sysctl: net.ipv4.tcp_wmem now
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_wmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 65536 268435456' ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_wmem 2>/dev/null | tr '\t' ' ')
[ -n "$cc_now" ] || { cc_say "this kernel has no net.ipv4.tcp_wmem"; exit 1; }
cc_journal 'now net.ipv4.tcp_wmem' sh -c '[ ! -e "$2" ] || printf "%s\n" "$1" >"$2"' sh "$cc_now" /proc/sys/net/ipv4/tcp_wmem
printf '%s\n' '4096 65536 268435456' >/proc/sys/net/ipv4/tcp_wmem
cc_now=$(cat /proc/sys/net/ipv4/tcp_wmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 65536 268435456' ] || { cc_say "the kernel took $cc_now for net.ipv4.tcp_wmem, not 4096 65536 268435456"; exit 1; }
# ===== verify, stage base: gpu01 gpu02 gpu03
# --- sysctl: kernel.numa_balancing
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/kernel/numa_balancing 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 0 ] || [ ! -e /proc/sys/kernel/numa_balancing ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/kernel/numa_balancing 2>/dev/null | tr '\t' ' ')
cc_say "kernel.numa_balancing is ${cc_now:-unknown to this kernel}, not 0: see sysctl --system"
false
# --- sysctl: net.core.rmem_max
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 268435456 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/rmem_max 2>/dev/null | tr '\t' ' ')
cc_say "net.core.rmem_max is ${cc_now:-unknown to this kernel}, not 268435456: see sysctl --system"
false
# --- sysctl: net.core.wmem_max
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/wmem_max 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = 268435456 ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/core/wmem_max 2>/dev/null | tr '\t' ' ')
cc_say "net.core.wmem_max is ${cc_now:-unknown to this kernel}, not 268435456: see sysctl --system"
false
# --- sysctl: net.ipv4.tcp_rmem
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 131072 268435456' ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_rmem 2>/dev/null | tr '\t' ' ')
cc_say "net.ipv4.tcp_rmem is ${cc_now:-unknown to this kernel}, not 4096 131072 268435456: see sysctl --system"
false
# --- sysctl: net.ipv4.tcp_wmem
# unless
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_wmem 2>/dev/null | tr '\t' ' ')
[ "$cc_now" = '4096 65536 268435456' ]
# do
cc_service=sysctl
cc_now=$(cat /proc/sys/net/ipv4/tcp_wmem 2>/dev/null | tr '\t' ' ')
cc_say "net.ipv4.tcp_wmem is ${cc_now:-unknown to this kernel}, not 4096 65536 268435456: see sysctl --system"
false
