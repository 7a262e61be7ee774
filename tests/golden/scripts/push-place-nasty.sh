# A command that takes the lock ends this script first: a lost connection must not leave it running, and a command that
# lost its lock by silence must not continue under another command's lock.
cc_worker='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder.lock'/worker.$$.$(uname -n)
true >"$cc_worker" && IFS= read -r cc_id <'/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder.lock'/owner && [ "$cc_id" = TOKEN ] || {
    rm -f -- "$cc_worker"
    echo 'the lock no longer exists: another command has taken over' >&2
    exit 1
}
trap 'rm -f -- "$cc_worker"' 0
# Moves received files to the destination; an existing file is replaced in one rename. The input has one action per line,
# with escapes for printf %b:
#   folder MODE PATH    create a folder, or make it writable
#   group KEY           the small files of one part follow
#   small PATH          move a small file
#   one NAME PATH       move a large file, or the only one
#   mode MODE PATH      set a folder's final mode
# A missing file is an error: files that a killed push has moved are not requested again.
set -e
umask 077 # a private folder is private from the first moment
into='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder/tree'
staging='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder'
destination='/opt/it'\''s $(id) "x"/data'
# A file's name must not reach the disk before its bytes.
sync -f -- "$into" 2>/dev/null || sync
folder= # of the small files that wait to be moved together
move() { # move FILE...: into that folder
    [ "$#" -eq 0 ] || mv -f -- "$@" "$folder/"
}
set --
while IFS= read -r line; do
    case $line in
        *\\*)
            line=$(printf '%bx' "$line")
            line=${line%x}
            ;;
    esac
    word=${line%% *}
    rest=${line#* }
    case $word in
        folder)
            path=$destination/${rest#* }
            [ ! -L "$path" ] || rm -f -- "$path" # what it leads to is not the push's
            if [ -d "$path" ]; then chmod -- "${rest%% *}" "$path"; else mkdir -m "${rest%% *}" -- "$path"; fi
            ;;
        group)
            move "$@"
            set --
            # Under its own name it would count as complete.
            rm -rf -- "$into/placing"
            mv -- "$into/small/$rest" "$into/placing"
            ;;
        small)
            case $rest in
                */*) path=$destination/${rest%/*} ;;
                *) path=$destination ;;
            esac
            if [ "$path" != "$folder" ] || [ "$#" -ge 200 ]; then
                move "$@"
                set --
                folder=$path
            fi
            set -- "$@" "$into/placing/$rest"
            ;;
        one)
            path=${rest#* }
            mv -fT -- "$into/${rest%% *}" "$destination${path:+/$path}"
            ;;
        mode)
            move "$@"
            set --
            chmod -- "${rest%% *}" "$destination/${rest#* }"
            ;;
    esac
done
move "$@"
if [ -e "$staging/mode" ]; then
    rm -rf -- "$into" "$staging/transfer"
    echo open
else
    rm -rf -- "$staging"
fi
echo end
