# Lists the wanted paths that exist on this node. Read-only. The input has the paths, each followed by a NUL. Every
# answer starts with a token that no name contains, because a name may contain any other text.
LC_ALL=C
export LC_ALL
destination=/opt/llm/data
staging=/opt/llm/data/.clusterctl-push-folder
token=TOKEN
say() { printf '%s %s\n' "$token" "$*"; }
refuse() {
    cat >/dev/null
    say refuse "$*"
    say end
    exit 0
}
user=$(id -u)
me=$(id -un 2>/dev/null || echo "$user")

base=$destination
if [ -e "$base" ] && ! [ -d "$base" ]; then refuse "$base is not a folder on the node but a folder here; move it away"; fi
while [ -n "$base" ] && ! [ -e "$base" ] && ! [ -L "$base" ]; do base=${base%/*}; done
base=${base:-/}
[ -d "$base" ] || refuse "$base is not a folder"
if ! [ -w "$base" ] || ! [ -x "$base" ]; then
    # Its owner may change that, and the push does.
    [ "$base" = "$destination" ] && [ "$(stat -c %u -- "$base")" = "$user" ] ||
        refuse "$me may not write in $base; choose another destination, or ask an administrator to create it"
fi
taken=$(cd -P -- /opt/llm/releases 2>/dev/null && pwd -P)
real=$(cd -P -- "$base" 2>/dev/null && pwd -P)
if [ -n "$taken" ]; then
    case $real/ in "$taken"/*) refuse "$base leads to $taken, where clusterctl keeps releases; choose another destination" ;; esac
fi

say user "$user"
say tools "$(for tool in zstd ssh; do command -v "$tool" >/dev/null 2>&1 && printf '%s ' "$tool"; done)"
space=$(stat -f -c '%a %S' -- "$base" 2>/dev/null) && {
    # shellcheck disable=SC2086 # two numbers
    set -- $space
    say free "$(($1 * $2))"
}
if [ -d "$staging" ]; then
    if ! [ -r "$staging" ] || ! [ -w "$staging" ] || ! [ -x "$staging" ]; then
        refuse "$staging is left from another user's push; ask that user to push again or to remove it"
    fi
    blocks=$(du -sk -- "$staging" 2>/dev/null)
    blocks=${blocks%%[!0-9]*}
    say staged "$((${blocks:-0} * 1024))"
fi

if [ -d "$destination" ] && command -v xargs >/dev/null 2>&1; then
    cd -- "$destination" || exit 1
    # shellcheck disable=SC2016 # the inner sh expands it
    xargs -0 sh -c '
        token=$1
        shift
        stat -c "$token at %f %s %Y %u %n" -- "$@" 2>/dev/null
        for path; do
            if [ -L "$path" ]; then
                printf "%s link %s\n%s to " "$token" "$path" "$token"
                readlink -- "$path" || echo
            elif [ -d "$path" ] && ! { [ -w "$path" ] && [ -x "$path" ]; }; then
                printf "%s closed %s\n" "$token" "$path"
            fi
        done' sh "$token"
fi
cat >/dev/null
say end
