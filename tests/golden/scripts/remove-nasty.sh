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
echo @clusterctl:TOKEN:start:0:remove
(
set -e
false
) </dev/null >/dev/null 2>&1
cc_rc=$?
if [ "$cc_rc" -eq 0 ]; then
cc_mark 0 ok 0
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
# Deletes the mark first, then the name, then the files: the rest of a killed removal never looks like a release.
rm -f -- '/opt/it'\''s $(id) "x"/releases/0123456789ab'.ok
discard '/opt/it'\''s $(id) "x"/releases/.removing-0123456789ab'
mv -T -- '/opt/it'\''s $(id) "x"/releases/0123456789ab' '/opt/it'\''s $(id) "x"/releases/.removing-0123456789ab'
discard '/opt/it'\''s $(id) "x"/releases/.removing-0123456789ab'
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
exit 0
