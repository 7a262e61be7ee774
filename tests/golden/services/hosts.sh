# ===== apply, stage base: gpu01
# --- hosts: names of the nodes
# unless
cc_service=hosts
read -r cc_host </proc/sys/kernel/hostname
cc_names=' gpu01 gpu02 gpu03 '
case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac
cc_hosts='10.1.0.2 gpu02
10.1.0.3 gpu03
10.1.0.1 gpu01'$cc_alias'
'
cc_has_block /etc/hosts nodes "$cc_hosts"
# do
cc_service=hosts
read -r cc_host </proc/sys/kernel/hostname
cc_names=' gpu01 gpu02 gpu03 '
case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac
cc_hosts='10.1.0.2 gpu02
10.1.0.3 gpu03
10.1.0.1 gpu01'$cc_alias'
'
cc_block /etc/hosts nodes "$cc_hosts" top
cc_block_done /etc/hosts nodes
# ===== apply, stage base: gpu02
# --- hosts: names of the nodes
# unless
cc_service=hosts
read -r cc_host </proc/sys/kernel/hostname
cc_names=' gpu01 gpu02 gpu03 '
case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac
cc_hosts='10.1.0.1 gpu01
10.1.0.3 gpu03
10.1.0.2 gpu02'$cc_alias'
'
cc_has_block /etc/hosts nodes "$cc_hosts"
# do
cc_service=hosts
read -r cc_host </proc/sys/kernel/hostname
cc_names=' gpu01 gpu02 gpu03 '
case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac
cc_hosts='10.1.0.1 gpu01
10.1.0.3 gpu03
10.1.0.2 gpu02'$cc_alias'
'
cc_block /etc/hosts nodes "$cc_hosts" top
cc_block_done /etc/hosts nodes
# ===== apply, stage base: gpu03
# --- hosts: names of the nodes
# unless
cc_service=hosts
read -r cc_host </proc/sys/kernel/hostname
cc_names=' gpu01 gpu02 gpu03 '
case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac
cc_hosts='10.1.0.1 gpu01
10.1.0.2 gpu02
10.1.0.3 gpu03'$cc_alias'
'
cc_has_block /etc/hosts nodes "$cc_hosts"
# do
cc_service=hosts
read -r cc_host </proc/sys/kernel/hostname
cc_names=' gpu01 gpu02 gpu03 '
case $cc_names in *" $cc_host "*) cc_alias= ;; *) cc_alias=" $cc_host" ;; esac
cc_hosts='10.1.0.1 gpu01
10.1.0.2 gpu02
10.1.0.3 gpu03'$cc_alias'
'
cc_block /etc/hosts nodes "$cc_hosts" top
cc_block_done /etc/hosts nodes
# ===== verify, stage base: gpu01 gpu02 gpu03
# --- hosts: names resolve to the nodes
# unless
cc_service=hosts
for cc_p in 'gpu01=10.1.0.1' 'gpu02=10.1.0.2' 'gpu03=10.1.0.3'; do
  cc_a=$(getent ahosts "${cc_p%%=*}" | sed -n "1s/[[:space:]].*//p")
  [ "$cc_a" = "${cc_p#*=}" ] || exit 1
done
# do
cc_service=hosts
for cc_p in 'gpu01=10.1.0.1' 'gpu02=10.1.0.2' 'gpu03=10.1.0.3'; do
  cc_a=$(getent ahosts "${cc_p%%=*}" | sed -n "1s/[[:space:]].*//p")
  [ "$cc_a" = "${cc_p#*=}" ] || echo "${cc_p%%=*} resolves to ${cc_a:-nothing}, expected ${cc_p#*=}"
done
false
