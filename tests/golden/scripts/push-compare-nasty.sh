# What of the wanted paths this node has. Reads only. The paths come on the input, each ended by a NUL.
destination='/opt/it'\''s $(id) "x"/data'
base='/opt/it'\''s $(id) "x"'
while [ ! -e "$base" ]; do base=$(dirname -- "$base"); done
if ! [ -d "$base" ]; then echo "refuse $base is no folder"; exit 0; fi
if ! [ -w "$base" ] || ! [ -x "$base" ]; then
    echo "refuse $(id -un 2>/dev/null || id -u) may not write in $base; choose another destination, or let an administrator make it"
    exit 0
fi
if [ -d "$destination" ] && ! [ -w "$destination" ]; then
    echo "refuse $(id -un 2>/dev/null || id -u) may not write in $destination"
    exit 0
fi
echo "tools $(for tool in zstd ssh; do command -v "$tool" >/dev/null 2>&1 && printf '%s ' "$tool"; done)"
space=$(stat -f -c '%a %S' -- "$base" 2>/dev/null) && {
    # shellcheck disable=SC2086 # two numbers
    set -- $space
    echo "free $(($1 * $2))"
}
if [ -d "$destination" ] && command -v xargs >/dev/null 2>&1; then
    cd -- "$destination" || exit 1
    xargs -0 stat -c 'at %f %s %Y %n' -- 2>/dev/null
    find . -type l 2>/dev/null | while IFS= read -r link; do
        printf 'link %s\t%s\n' "${link#./}" "$(readlink -- "$link")"
    done
elif [ -f "$destination" ]; then
    stat -c 'at %f %s %Y .' -- "$destination"
    cat >/dev/null
else
    cat >/dev/null
fi
echo end
