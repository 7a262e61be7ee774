# Moves what has arrived to its place; a file there is replaced in one rename. Fields come on the input, one a line,
# with the escapes that printf %b undoes. Killed and run again, it goes on.
set -e
umask 022
into=/opt/llm/.clusterctl-push-6f2e81c74736/tree
destination=/opt/llm/data
field() { # field: the next one, exactly
    IFS= read -r cc_field || return 1
    case $cc_field in
        *\\*)
            cc_field=$(printf '%bx' "$cc_field")
            cc_field=${cc_field%x}
            ;;
    esac
}
folder= # of the small files that wait to be moved together
move() { # move FILE...: into that folder
    [ "$#" -eq 0 ] || mv -f -- "$@" "$folder/"
}
set --
while field; do
    kind=$cc_field
    field
    from=$cc_field
    field
    to=$cc_field
    case $kind in
        folder) [ -d "$destination/$from" ] || mkdir -p -- "$destination/$from" ;;
        small)
            [ -e "$into/$from" ] || [ -L "$into/$from" ] || continue
            if [ "$destination/$to" != "$folder" ] || [ "$#" -ge 200 ]; then
                move "$@"
                set --
                folder=$destination/$to
            fi
            set -- "$@" "$into/$from"
            ;;
        one)
            [ -e "$into/$from" ] || continue
            target=$destination${to:+/$to}
            if [ -d "$target" ] && ! [ -L "$target" ]; then
                echo "$target is a folder on the node and a file here; move it away" >&2
                exit 1
            fi
            [ -d "${target%/*}/" ] || mkdir -p -- "${target%/*}"
            mv -fT -- "$into/$from" "$target"
            ;;
        mode)
            move "$@"
            set --
            chmod -- "$to" "$destination/$from"
            ;;
    esac
done
move "$@"
rm -rf -- /opt/llm/.clusterctl-push-6f2e81c74736
echo end
