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
echo @clusterctl:TOKEN:start:0:complete
(
set -e
[ -e '/opt/it'\''s $(id) "x"/releases/0123456789ab' ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 0 ok 0
else
cc_mark 0 "would change" 0
fi
echo @clusterctl:TOKEN:start:1:compile
(
set -e
[ -e '/opt/it'\''s $(id) "x"/releases/0123456789ab'/.clusterctl/files/compiled ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 1 ok 0
else
cc_mark 1 "would change" 0
fi
echo @clusterctl:TOKEN:start:2:seal
(
set -e
[ -e '/opt/it'\''s $(id) "x"/releases/0123456789ab.ok' ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 2 ok 0
else
cc_mark 2 "would change" 0
fi
echo '@clusterctl:TOKEN:start:3:smoke test'
(
set -e
[ -e '/opt/it'\''s $(id) "x"/releases/0123456789ab.ok' ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 3 ok 0
else
cc_mark 3 "would change" 0
fi
echo @clusterctl:TOKEN:start:4:mark
(
set -e
[ -e '/opt/it'\''s $(id) "x"/releases/0123456789ab.ok' ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 4 ok 0
else
cc_mark 4 "would change" 0
fi
echo @clusterctl:TOKEN:start:5:switch
(
set -e
t=$(readlink -- '/opt/it'\''s $(id) "x"/current') && [ "$t" = releases/0123456789ab ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 5 ok 0
else
cc_mark 5 "would change" 0
fi
echo @clusterctl:TOKEN:start:6:tidy
(
set -e
for path in '/opt/it'\''s $(id) "x"/releases/.transfer-0123456789ab' '/opt/it'\''s $(id) "x"/releases/.removing-0123456789ab' '/opt/it'\''s $(id) "x"/releases/.incoming-0123456789ab'; do [ ! -e "$path" ] || exit 1; done
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 6 ok 0
else
cc_mark 6 "would change" 0
fi
exit 0
