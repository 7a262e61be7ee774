# ===== apply, stage serve: gpu03
# --- opensm: InfiniBand
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
[ -n "$(cc_ports)" ]
# do
cc_service=opensm
cc_say "this node has no InfiniBand port: name a node that has one with services: opensm: node:"
false
# --- opensm: installed
# unless
cc_service=opensm
# OFED's unit is opensmd.service; Debian, Ubuntu and Red Hat have opensm.service.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
if cc_has_unit opensmd.service; then cc_unit=opensmd.service; else cc_unit=opensm.service; fi
command -v opensm && cc_has_unit "$cc_unit"
# do
cc_service=opensm
cc_say "opensm is not installed: add it with services: os_packages:, or by hand"
false
# --- opensm: module ib_umad
# unless
cc_service=opensm
cat /sys/class/infiniband_mad/abi_version
# do
cc_service=opensm
modprobe ib_umad
cat /sys/class/infiniband_mad/abi_version >/dev/null
# --- opensm: running
# unless
cc_service=opensm
# OFED's unit is opensmd.service; Debian, Ubuntu and Red Hat have opensm.service.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
if cc_has_unit opensmd.service; then cc_unit=opensmd.service; else cc_unit=opensm.service; fi
cc_on "$cc_unit"
# do
cc_service=opensm
# OFED's unit is opensmd.service; Debian, Ubuntu and Red Hat have opensm.service.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
if cc_has_unit opensmd.service; then cc_unit=opensmd.service; else cc_unit=opensm.service; fi
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
# Prints the links of the whole fabric that are up and wait for the subnet manager, as this node sees them.
cc_joining() {
  iblinkinfo -l </dev/null 2>/dev/null | awk '
    / (Initialize|Armed)\// {
      name = $0; sub(/^[^"]*" */, "", name); sub(/".*/, "", name)
      port = $0; sub(/\[.*/, "", port); sub(/.* /, "", port)
      print name " port " port " is Initializing"
    }'
}
# cc_wait SECONDS COMMAND: waits until the command prints nothing; $cc_left is the rest. Ports need a moment after a
# start.
cc_wait() {
  cc_end=$(($(date +%s) + $1))
  while
    cc_left=$(eval "$2")
    [ -n "$cc_left" ] && [ "$(date +%s)" -lt "$cc_end" ]
  do sleep 1; done
  [ -z "$cc_left" ]
}

cc_start "$cc_unit"
if ! cc_on "$cc_unit"; then
  cc_say "$cc_unit exited at once; with PORTS=NONE in /etc/default/opensm it starts nothing"
  cc_why "$cc_unit"
fi
cc_wait 20 'cc_waiting; cc_silent; cc_joining' || :
# --- opensm: answers
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
# Prints the links of the whole fabric that are up and wait for the subnet manager, as this node sees them.
cc_joining() {
  iblinkinfo -l </dev/null 2>/dev/null | awk '
    / (Initialize|Armed)\// {
      name = $0; sub(/^[^"]*" */, "", name); sub(/".*/, "", name)
      port = $0; sub(/\[.*/, "", port); sub(/.* /, "", port)
      print name " port " port " is Initializing"
    }'
}
[ -z "$(eval 'cc_waiting; cc_silent; cc_joining')" ]
# do
cc_service=opensm
# OFED's unit is opensmd.service; Debian, Ubuntu and Red Hat have opensm.service.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
if cc_has_unit opensmd.service; then cc_unit=opensmd.service; else cc_unit=opensm.service; fi
cc_restart "$cc_unit"
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
# Prints the links of the whole fabric that are up and wait for the subnet manager, as this node sees them.
cc_joining() {
  iblinkinfo -l </dev/null 2>/dev/null | awk '
    / (Initialize|Armed)\// {
      name = $0; sub(/^[^"]*" */, "", name); sub(/".*/, "", name)
      port = $0; sub(/\[.*/, "", port); sub(/.* /, "", port)
      print name " port " port " is Initializing"
    }'
}
# cc_wait SECONDS COMMAND: waits until the command prints nothing; $cc_left is the rest. Ports need a moment after a
# start.
cc_wait() {
  cc_end=$(($(date +%s) + $1))
  while
    cc_left=$(eval "$2")
    [ -n "$cc_left" ] && [ "$(date +%s)" -lt "$cc_end" ]
  do sleep 1; done
  [ -z "$cc_left" ]
}
cc_wait 60 'cc_waiting; cc_silent; cc_joining' || { cc_say "$cc_left"; cc_say 'see /var/log/opensm*.log; a port of another fabric needs another subnet manager'; false; }
# ===== apply, stage follow: gpu01 gpu02
# --- opensm: no other subnet manager
# unless
cc_service=opensm
for cc_u in opensmd.service opensm.service; do cc_off "$cc_u" || exit 1; done
# do
cc_service=opensm
for cc_u in opensmd.service opensm.service; do cc_off "$cc_u" || cc_stop "$cc_u"; done
# --- opensm: ports are Active
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
[ -z "$(eval 'cc_waiting; cc_silent')" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
# cc_wait SECONDS COMMAND: waits until the command prints nothing; $cc_left is the rest. Ports need a moment after a
# start.
cc_wait() {
  cc_end=$(($(date +%s) + $1))
  while
    cc_left=$(eval "$2")
    [ -n "$cc_left" ] && [ "$(date +%s)" -lt "$cc_end" ]
  do sleep 1; done
  [ -z "$cc_left" ]
}
cc_wait 60 'cc_waiting; cc_silent' || { cc_say "$cc_left"; cc_say 'the subnet manager does not see this node: check that it is cabled to the same fabric'; false; }
# ===== verify, stage serve: gpu03
# --- opensm: ports with a link are Active
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
[ -z "$(cc_waiting)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
cc_waiting
false
# --- opensm: cables carry a signal
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints ports with a cable but no link; if no port has a link, also disabled ports.
cc_loose() {
  cc_ports | awk '
    { line[NR] = $1 " port " $2 " is " $4; kind[NR] = $4; up += $4 == "LinkUp" }
    END { for (n = 1; n <= NR; n++) if (kind[n] != "LinkUp" && (!up || kind[n] != "Disabled")) print line[n] }'
}
[ -z "$(cc_loose)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints ports with a cable but no link; if no port has a link, also disabled ports.
cc_loose() {
  cc_ports | awk '
    { line[NR] = $1 " port " $2 " is " $4; kind[NR] = $4; up += $4 == "LinkUp" }
    END { for (n = 1; n <= NR; n++) if (kind[n] != "LinkUp" && (!up || kind[n] != "Disabled")) print line[n] }'
}
cc_loose
false
# --- opensm: the subnet manager answers
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
[ -z "$(cc_silent)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
cc_silent
false
# --- opensm: infiniband-diags is installed
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
command -v sminfo && command -v iblinkinfo && command -v ibqueryerrors
# do
cc_service=opensm
cc_say "infiniband-diags is not installed: the fabric cannot be queried; add it with services: os_packages:"
false
# --- opensm: one master
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints fabrics with several masters, from their lists of subnet managers: SMState is 3 for a master, 2 for a
# standby.
cc_masters() {
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    saquery -C "$cc_d" -P "$cc_n" SMIR </dev/null 2>/dev/null | awk -v at="$cc_d port $cc_n" '
      { value = $1; sub(/.*\.\./, "", value) }
      $1 ~ /^LID\./ { lid = value }
      $1 ~ /^GUID\./ { guid = value }
      $1 == "SMState...............3" { n++; list = list (n > 1 ? ", " : "") guid " at LID " lid }
      END { if (n > 1) print at " sees " n " masters: " list "; stop all but one" }'
  done
}
[ -z "$(cc_masters)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints fabrics with several masters, from their lists of subnet managers: SMState is 3 for a master, 2 for a
# standby.
cc_masters() {
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    saquery -C "$cc_d" -P "$cc_n" SMIR </dev/null 2>/dev/null | awk -v at="$cc_d port $cc_n" '
      { value = $1; sub(/.*\.\./, "", value) }
      $1 ~ /^LID\./ { lid = value }
      $1 ~ /^GUID\./ { guid = value }
      $1 == "SMState...............3" { n++; list = list (n > 1 ? ", " : "") guid " at LID " lid }
      END { if (n > 1) print at " sees " n " masters: " list "; stop all but one" }'
  done
}
cc_masters
false
# --- opensm: links run at full rate
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints links that are slower than most but could be faster: `... 1[  ] ==( 1X  25.78125 Gbps Active/  LinkUp)==> ...
# 7[  ] "SW1" (Could be 4X)`. Both ends report a link; one line is enough.
cc_slow() {
  iblinkinfo -l </dev/null 2>/dev/null | awk '
    /Active\// {
      at = $0; sub(/ *==\(.*/, "", at); sub(/^[^"]*" */, "", at); gsub(/" +/, " LID ", at); gsub(/\[[^]]*\]/, "", at)
      to = $0; sub(/.*==> *0x[0-9a-f]+ +/, "", to); sub(/ *\(.*/, "", to); gsub(/\[[^]]*\]/, "", to)
      how = $0; sub(/.*==\( */, "", how); sub(/ *Active.*/, "", how)
      split(how, part, " "); rate = part[1] * part[2]
      name = to; sub(/.* "/, "", name); sub(/".*/, "", name)
      split(at, mine, " LID "); split(mine[2], mine_at, " +"); split(to, other, " +")
      left = mine[1] " port " mine_at[2]; right = name " port " other[2]
      if ((right, left) in seen) next
      seen[left, right] = 1
      count[rate]++; n++; rates[n] = rate; could[n] = /Could be/; line[n] = left " to " right " runs at " part[1] " " part[2] " Gb/s a lane"
    }
    END {
      for (rate in count) if (count[rate] > best || (count[rate] == best && rate + 0 > most + 0)) { best = count[rate]; most = rate }
      for (i = 1; i <= n; i++) if (rates[i] + 0 < most + 0 && could[i]) print line[i] ": replace its cable or transceiver"
    }'
}
[ -z "$(cc_slow)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints links that are slower than most but could be faster: `... 1[  ] ==( 1X  25.78125 Gbps Active/  LinkUp)==> ...
# 7[  ] "SW1" (Could be 4X)`. Both ends report a link; one line is enough.
cc_slow() {
  iblinkinfo -l </dev/null 2>/dev/null | awk '
    /Active\// {
      at = $0; sub(/ *==\(.*/, "", at); sub(/^[^"]*" */, "", at); gsub(/" +/, " LID ", at); gsub(/\[[^]]*\]/, "", at)
      to = $0; sub(/.*==> *0x[0-9a-f]+ +/, "", to); sub(/ *\(.*/, "", to); gsub(/\[[^]]*\]/, "", to)
      how = $0; sub(/.*==\( */, "", how); sub(/ *Active.*/, "", how)
      split(how, part, " "); rate = part[1] * part[2]
      name = to; sub(/.* "/, "", name); sub(/".*/, "", name)
      split(at, mine, " LID "); split(mine[2], mine_at, " +"); split(to, other, " +")
      left = mine[1] " port " mine_at[2]; right = name " port " other[2]
      if ((right, left) in seen) next
      seen[left, right] = 1
      count[rate]++; n++; rates[n] = rate; could[n] = /Could be/; line[n] = left " to " right " runs at " part[1] " " part[2] " Gb/s a lane"
    }
    END {
      for (rate in count) if (count[rate] > best || (count[rate] == best && rate + 0 > most + 0)) { best = count[rate]; most = rate }
      for (i = 1; i <= n; i++) if (rates[i] + 0 < most + 0 && could[i]) print line[i] ": replace its cable or transceiver"
    }'
}
cc_slow
false
# --- opensm: links have no errors
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints ports of the fabric whose error counters are above ibqueryerrors' thresholds, with both ends of their cables.
# Congestion counters do not indicate a bad cable.
cc_errors() {
  ibqueryerrors -r -c -s PortXmitWait,PortXmitDiscards </dev/null 2>/dev/null | awk '
    /^Errors for / { name = $0; sub(/^[^"]*"/, "", name); sub(/".*/, "", name); next }
    / port ALL:/ { held = ""; next }
    / port [0-9]+:/ { held = $0; sub(/^.* port /, "", held); sub(/ *$/, "", held); next }
    /Link info:/ && held != "" {
      to = $0; sub(/.*==> *0x[0-9a-f]+ +/, "", to); sub(/ *\([^"]*$/, "", to); gsub(/\[[^]]*\]/, "", to); split(to, end, " +")
      peer = to; sub(/.* "/, "", peer); sub(/".*/, "", peer)
      print name " port " held " on its cable to " peer " port " end[2] ": clean, reseat, then replace it"
      held = ""
    }'
}
[ -z "$(cc_errors)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints ports of the fabric whose error counters are above ibqueryerrors' thresholds, with both ends of their cables.
# Congestion counters do not indicate a bad cable.
cc_errors() {
  ibqueryerrors -r -c -s PortXmitWait,PortXmitDiscards </dev/null 2>/dev/null | awk '
    /^Errors for / { name = $0; sub(/^[^"]*"/, "", name); sub(/".*/, "", name); next }
    / port ALL:/ { held = ""; next }
    / port [0-9]+:/ { held = $0; sub(/^.* port /, "", held); sub(/ *$/, "", held); next }
    /Link info:/ && held != "" {
      to = $0; sub(/.*==> *0x[0-9a-f]+ +/, "", to); sub(/ *\([^"]*$/, "", to); gsub(/\[[^]]*\]/, "", to); split(to, end, " +")
      peer = to; sub(/.* "/, "", peer); sub(/".*/, "", peer)
      print name " port " held " on its cable to " peer " port " end[2] ": clean, reseat, then replace it"
      held = ""
    }'
}
cc_errors
false
# ===== verify, stage follow: gpu01 gpu02
# --- opensm: ports with a link are Active
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
[ -z "$(cc_waiting)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the ports with a link that no subnet manager has made Active.
cc_waiting() { cc_ports | awk '$4 == "LinkUp" && $3 != "ACTIVE" { print $1 " port " $2 " is " $3 }'; }
cc_waiting
false
# --- opensm: cables carry a signal
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints ports with a cable but no link; if no port has a link, also disabled ports.
cc_loose() {
  cc_ports | awk '
    { line[NR] = $1 " port " $2 " is " $4; kind[NR] = $4; up += $4 == "LinkUp" }
    END { for (n = 1; n <= NR; n++) if (kind[n] != "LinkUp" && (!up || kind[n] != "Disabled")) print line[n] }'
}
[ -z "$(cc_loose)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints ports with a cable but no link; if no port has a link, also disabled ports.
cc_loose() {
  cc_ports | awk '
    { line[NR] = $1 " port " $2 " is " $4; kind[NR] = $4; up += $4 == "LinkUp" }
    END { for (n = 1; n <= NR; n++) if (kind[n] != "LinkUp" && (!up || kind[n] != "Disabled")) print line[n] }'
}
cc_loose
false
# --- opensm: the subnet manager answers
# unless
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
[ -z "$(cc_silent)" ]
# do
cc_service=opensm
# DEVICE PORT STATE PHYSICAL of every InfiniBand port, such as `mlx5_0 1 ACTIVE LinkUp`.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
cc_ports() {
  for cc_p in /sys/class/infiniband/*/ports/*; do
    # shellcheck disable=SC2046 # words such as `4: ACTIVE 5: LinkUp InfiniBand`; old kernels tell no link layer
    set -- $(cat "$cc_p/state" "$cc_p/phys_state" "$cc_p/link_layer" 2>/dev/null)
    case ${5:-IB} in IB | InfiniBand) ;; *) continue ;; esac
    [ $# -ge 4 ] || continue
    cc_d=${cc_p%/ports/*}
    echo "${cc_d##*/} ${cc_p##*/} $2 $4"
  done
}
# Prints the Active ports whose subnet manager does not answer. This needs infiniband-diags.
cc_silent() {
  command -v sminfo >/dev/null 2>&1 || return 0
  cc_ports | while read -r cc_d cc_n cc_s _; do
    [ "$cc_s" = ACTIVE ] || continue
    sminfo -C "$cc_d" -P "$cc_n" -t 500 </dev/null 2>/dev/null | grep -q SMINFO_MASTER ||
      echo "the subnet manager of $cc_d port $cc_n does not answer"
  done
}
cc_silent
false
# --- opensm: no other subnet manager
# unless
cc_service=opensm
for cc_u in opensmd.service opensm.service; do ! systemctl is-active -q "$cc_u" || exit 1; done
# do
cc_service=opensm
cc_say "a second subnet manager is running here; the one on gpu03 is enough"
false
