# Creates the destination, or makes it writable for its owner, because the staging folder is in it. The final mode is
# saved in the staging folder, so that it is known after a kill.
set -e
umask 022
destination='/opt/it'\''s $(id) "x"/data'
staging='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder'
mode=
if ! [ -d "$destination" ]; then
    mkdir -p -- "${destination%/*}/"
    mkdir -m 750 -- "$destination" || [ -d "$destination" ] # another node that shares it may be quicker
    mode=750
    [ "$mode" != 750 ] || mode=
elif ! [ -w "$destination" ] || ! [ -x "$destination" ]; then
    mode=$(stat -c %a -- "$destination")
    chmod u+rwx -- "$destination"
fi
[ -d "$staging" ] || mkdir -m 700 -- "$staging" || [ -d "$staging" ]
[ -z "$mode" ] || [ -s "$staging/mode" ] || echo "$mode" >"$staging/mode"
