#!/bin/sh
# Replaces systemctl on a simulated host: the units are the files in $FABRIC_UNITS, and to start opensm.service is
# to start the real opensm. What it knows: is-enabled, is-active, enable, disable, start, stop, restart, list-unit-files.
set -eu
at=$FABRIC_UNITS
verb=$1
shift
now=
quiet=
while [ $# -gt 0 ]; do
  case $1 in
    --now) now=1 ;;
    -q) quiet=1 ;;
    -*) ;;
    *) break ;;
  esac
  shift
done
unit=${1:-}

alive() {
  [ -s "$at/$unit.pid" ] || return 1
  state=$(sed 's/.*) //; s/ .*//' "/proc/$(cat "$at/$unit.pid")/stat" 2>/dev/null) || return 1
  [ -n "$state" ] && [ "$state" != Z ]
}
start() {
  [ -e "$at/$unit" ] || { echo "Unit $unit not found." >&2; exit 5; }
  alive && return
  opensm -F "$at/opensm.conf" -f "$at/opensm.log" </dev/null >"$at/opensm.out" 2>&1 9>&- &
  echo $! >"$at/$unit.pid"
}
stop() {
  alive || { rm -f "$at/$unit.pid"; return 0; }
  kill "$(cat "$at/$unit.pid")"
  while alive; do sleep 0.05; done
  rm -f "$at/$unit.pid"
}

case $verb in
  list-unit-files) [ ! -e "$at/$unit" ] || echo "$unit enabled enabled" ;;
  is-enabled) if [ -e "$at/$unit.enabled" ]; then answer=enabled rc=0; else answer=disabled rc=1; fi ;;
  is-active) if alive || { [ -e "$at/$unit.oneshot" ] && [ -e "$at/$unit.pid" ]; }; then answer=active rc=0; else answer=inactive rc=3; fi ;;
  enable) : >"$at/$unit.enabled" ;;
  disable)
    rm -f "$at/$unit.enabled"
    [ -z "$now" ] || stop
    ;;
  start) start ;;
  stop) stop ;;
  restart)
    stop
    start
    ;;
  status) cat "$at/opensm.out" 2>/dev/null || : ;;
  daemon-reload) ;;
  *)
    echo "this replacement of systemctl does not know $verb" >&2
    exit 1
    ;;
esac
[ -z "${answer-}" ] || { [ -n "$quiet" ] || echo "$answer"; exit "$rc"; }
