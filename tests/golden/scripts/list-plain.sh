# Lists this node's releases. Read-only.
root=/opt/llm
same=$(stat -c '%i.%Z' -- "$root/releases/.clusterctl" 2>/dev/null) && echo "same $same" # for nodes that share the folder
link=$(readlink -- /opt/llm/current) && echo "current ${link##*/}"
for release in "$root"/releases/*/; do
    release=${release%/}
    name=${release##*/}
    case $name in *[!0-9a-f]*) continue ;; ????????????) ;; *) continue ;; esac # not a release id: clusterctl did not create it
    [ -d "$release" ] && [ ! -L "$release" ] || continue
    state=broken
    [ -e "$release.ok" ] && state=ok
    echo "release $name $state $(stat -c %Y -- "$release.ok" 2>/dev/null || echo 0)"
done
for left in "$root"/releases/.incoming-* "$root"/releases/.transfer-* "$root"/releases/.removing-*; do
    case ${left##*/.} in *[!0-9a-z-]*) continue ;; esac # not a name that clusterctl gives
    [ ! -d "$left" ] || echo "left ${left##*/}"
done
if [ -e "$root/releases/.history" ]; then
    while read -r when name; do echo "history $when $name"; done <"$root/releases/.history"
fi
# A process of a release names it in one of these files; of other users' processes only the command line is readable.
for process in /proc/[0-9]*; do
    case ${process#/proc/} in "$$" | self) continue ;; esac
    text=$(
        readlink -- "$process/exe" "$process/cwd" 2>/dev/null
        tr '\0' '\n' <"$process/cmdline" 2>/dev/null
        cat -- "$process/maps" 2>/dev/null
        tr '\0' '\n' <"$process/environ" 2>/dev/null
    )
    for release in "$root"/releases/*/; do
        release=${release%/}
        case $text in *"$release/"* | *"$release
"*) echo "used ${release##*/} ${process#/proc/}" ;; esac
    done
done
echo end
