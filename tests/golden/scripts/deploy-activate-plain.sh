LC_ALL=C
export LC_ALL
cc_clock() {
  cc_now=$(date +%s%N)
  case $cc_now in
    *[!0-9]*) cc_now=$(date +%s)000 ;;
    ????????????????*) cc_now=${cc_now%??????} ;;
    *) cc_now=$(date +%s)000 ;;
  esac
}
cc_mark() {
  cc_clock
  echo "@clusterctl:TOKEN:step:$1:$2:$3:$((cc_now - cc_before))"
  cc_before=$cc_now
}
cc_clock
cc_before=$cc_now
echo '@clusterctl:TOKEN:start:0:smoke test'
(
set -e
[ -e /opt/llm/releases/2cf61ad6ee6b.ok ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 0 ok 0
else
cc_out=$({ (
set -e
cd /
run() { env -i PATH=/usr/bin:/bin HOME="${HOME:-/}" LANG=C.UTF-8 "$@"; }
run /opt/llm/releases/2cf61ad6ee6b/bin/python -I -c 'import sys, torch, deepspeed'
run /opt/llm/releases/2cf61ad6ee6b/bin/torchrun --help >/dev/null
run /opt/llm/releases/2cf61ad6ee6b/bin/deepspeed --help >/dev/null
: >/opt/llm/releases/2cf61ad6ee6b.ok
) </dev/null 2>&1; echo "@rc:TOKEN:$?:"; } | tail -n 41 | tail -c 16000)
cc_rc=${cc_out##*@rc:TOKEN:}
cc_rc=${cc_rc%%:*}
if [ "$cc_rc" != 0 ]; then
cc_mark 0 failed "${cc_rc:=1}"
printf %s "${cc_out%@rc:TOKEN:*}"
exit "$cc_rc"
fi
cc_mark 0 changed 0
fi
echo @clusterctl:TOKEN:start:1:switch
(
set -e
t=$(readlink -- /opt/llm/current) && [ "$t" = releases/2cf61ad6ee6b ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 1 ok 0
else
cc_out=$({ (
set -e
cd -- /opt/llm
rm -f -- current.new
ln -s -- releases/2cf61ad6ee6b current.new
mv -T -- current.new current
) </dev/null 2>&1; echo "@rc:TOKEN:$?:"; } | tail -n 41 | tail -c 16000)
cc_rc=${cc_out##*@rc:TOKEN:}
cc_rc=${cc_rc%%:*}
if [ "$cc_rc" != 0 ]; then
cc_mark 1 failed "${cc_rc:=1}"
printf %s "${cc_out%@rc:TOKEN:*}"
exit "$cc_rc"
fi
cc_mark 1 changed 0
fi
exit 0
