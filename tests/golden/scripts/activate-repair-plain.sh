# A command that takes the lock ends this script first: a lost connection must not leave it running, and a command that
# lost its lock by silence must not continue under another command's lock.
cc_worker=/opt/llm/releases/.lock/worker.$$.$(uname -n)
true >"$cc_worker" && IFS= read -r cc_id </opt/llm/releases/.lock/owner && [ "$cc_id" = TOKEN ] || {
    rm -f -- "$cc_worker"
    echo 'the lock no longer exists: another command has taken over' >&2
    exit 1
}
trap 'rm -f -- "$cc_worker"' 0
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
! [ -e /opt/llm/releases/.incoming-0123456789ab ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 0 ok 0
else
cc_out=$({ (
set -e
[ -f /opt/llm/releases/.incoming-0123456789ab/.clusterctl/complete ] || { echo 'not everything has arrived; run the same command again'; exit 1; }
cd -- /opt/llm/releases/.incoming-0123456789ab
find . -type d ! -perm -200 -exec chmod u+w {} + # until it is sealed: the user may not be root
while IFS= read -r name; do rm -f -- "$(printf %b "$name")"; done <.clusterctl/stale
sync -f . 2>/dev/null || sync # a release under its final name is complete on the disk
if [ -e /opt/llm/releases/0123456789ab ]; then
    rm -f -- /opt/llm/releases/0123456789ab.ok
    mv -T -- /opt/llm/releases/0123456789ab /opt/llm/releases/.removing-0123456789ab
fi
mv -T -- /opt/llm/releases/.incoming-0123456789ab /opt/llm/releases/0123456789ab
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
echo @clusterctl:TOKEN:start:1:compile
(
set -e
[ -e /opt/llm/releases/0123456789ab/.clusterctl/files/compiled ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 1 ok 0
else
cc_out=$({ (
set -e
# Compiles modules now, because a release is read-only and Python would compile them at every start. A module that does
# not compile is skipped: it cannot be imported either.
umask 022
cd -- /opt/llm/releases/0123456789ab
printf '%s\n' lib/python3.11/_sysconfigdata.py |
    env -i PATH=/usr/bin:/bin LANG=C.UTF-8 /opt/llm/releases/0123456789ab/bin/python -I -m compileall -q -i - >/dev/null 2>&1 || :
printf '%s\n' lib/python3.11/__pycache__/_sysconfigdata.cpython-311.pyc | while IFS= read -r file; do
    [ ! -f "$file" ] || sha256sum -- "$file"
done >.clusterctl/files/compiled.new
mv -- .clusterctl/files/compiled.new .clusterctl/files/compiled
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
echo @clusterctl:TOKEN:start:2:seal
(
set -e
[ -e /opt/llm/releases/0123456789ab.ok ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 2 ok 0
else
cc_out=$({ (
set -e
chmod -R a-w -- /opt/llm/releases/0123456789ab
) </dev/null 2>&1; echo "@rc:TOKEN:$?:"; } | tail -n 41 | tail -c 16000)
cc_rc=${cc_out##*@rc:TOKEN:}
cc_rc=${cc_rc%%:*}
if [ "$cc_rc" != 0 ]; then
cc_mark 2 failed "${cc_rc:=1}"
printf %s "${cc_out%@rc:TOKEN:*}"
exit "$cc_rc"
fi
cc_mark 2 changed 0
fi
echo '@clusterctl:TOKEN:start:3:smoke test'
(
set -e
[ -e /opt/llm/releases/0123456789ab.ok ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 3 ok 0
else
cc_out=$({ (
set -e
cd /
run() { env -i PATH=/usr/bin:/bin HOME="${HOME:-/}" LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 "$@"; }
run /opt/llm/releases/0123456789ab/bin/python -B -I -c 'import sys, torch, deepspeed'
run /opt/llm/releases/0123456789ab/bin/torchrun --help >/dev/null
run /opt/llm/releases/0123456789ab/bin/deepspeed --help >/dev/null
) </dev/null 2>&1; echo "@rc:TOKEN:$?:"; } | tail -n 41 | tail -c 16000)
cc_rc=${cc_out##*@rc:TOKEN:}
cc_rc=${cc_rc%%:*}
if [ "$cc_rc" != 0 ]; then
cc_mark 3 failed "${cc_rc:=1}"
printf %s "${cc_out%@rc:TOKEN:*}"
exit "$cc_rc"
fi
cc_mark 3 changed 0
fi
echo @clusterctl:TOKEN:start:4:mark
(
set -e
[ -e /opt/llm/releases/0123456789ab.ok ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 4 ok 0
else
cc_out=$({ (
set -e
: >/opt/llm/releases/0123456789ab.ok
) </dev/null 2>&1; echo "@rc:TOKEN:$?:"; } | tail -n 41 | tail -c 16000)
cc_rc=${cc_out##*@rc:TOKEN:}
cc_rc=${cc_rc%%:*}
if [ "$cc_rc" != 0 ]; then
cc_mark 4 failed "${cc_rc:=1}"
printf %s "${cc_out%@rc:TOKEN:*}"
exit "$cc_rc"
fi
cc_mark 4 changed 0
fi
echo @clusterctl:TOKEN:start:5:switch
(
set -e
t=$(readlink -- /opt/llm/current) && [ "$t" = releases/0123456789ab ]
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 5 ok 0
else
cc_out=$({ (
set -e
cd -- /opt/llm
rm -f -- current.new
ln -s -- releases/0123456789ab current.new
echo "$(date +%s) "0123456789ab >>releases/.history # before the rename: a release that the history does not list was never current
mv -T -- current.new current
) </dev/null 2>&1; echo "@rc:TOKEN:$?:"; } | tail -n 41 | tail -c 16000)
cc_rc=${cc_out##*@rc:TOKEN:}
cc_rc=${cc_rc%%:*}
if [ "$cc_rc" != 0 ]; then
cc_mark 5 failed "${cc_rc:=1}"
printf %s "${cc_out%@rc:TOKEN:*}"
exit "$cc_rc"
fi
cc_mark 5 changed 0
fi
echo @clusterctl:TOKEN:start:6:tidy
(
set -e
for path in /opt/llm/releases/.transfer-0123456789ab /opt/llm/releases/.removing-0123456789ab /opt/llm/releases/.incoming-0123456789ab; do [ ! -e "$path" ] || exit 1; done
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 6 ok 0
else
cc_out=$({ (
set -e
discard() { # discard PATH...: also deletes read-only folders; never changes files, which other releases may link
    for cc_path; do
        [ -e "$cc_path" ] || [ -L "$cc_path" ] || continue
        find "$cc_path" -type d '(' -perm -500 -o -exec chmod u+rx {} ';' ')' -exec chmod u+w {} +
        rm -rf -- "$cc_path"
    done
}
discard /opt/llm/releases/.transfer-0123456789ab /opt/llm/releases/.removing-0123456789ab /opt/llm/releases/.incoming-0123456789ab
) </dev/null 2>&1; echo "@rc:TOKEN:$?:"; } | tail -n 41 | tail -c 16000)
cc_rc=${cc_out##*@rc:TOKEN:}
cc_rc=${cc_rc%%:*}
if [ "$cc_rc" != 0 ]; then
cc_mark 6 failed "${cc_rc:=1}"
printf %s "${cc_out%@rc:TOKEN:*}"
exit "$cc_rc"
fi
cc_mark 6 changed 0
fi
exit 0
