# A command that takes the lock ends this script first: a lost connection must not leave it running, and a command that
# lost its lock by silence must not continue under another command's lock.
cc_worker='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder.lock'/worker.$$.$(uname -n)
true >"$cc_worker" && IFS= read -r cc_id <'/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder.lock'/owner && [ "$cc_id" = TOKEN ] || {
    rm -f -- "$cc_worker"
    echo 'the lock no longer exists: another command has taken over' >&2
    exit 1
}
trap 'rm -f -- "$cc_worker"' 0
# Prepares a transfer, or continues an interrupted one. The input has the names of files that are wanted in the staging
# folder (`want NAME`), and keys of parts that only other nodes need (`skip KEY`).
set -e
umask 077 # other users must not read private files during the push
staging='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder'
transfer='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder/transfer'
into='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder/tree'
# A staging folder of another user is not used: that user could read it or redirect it.
[ "$(stat -c %u -- "$staging" 2>/dev/null)" = "$(id -u)" ] || rm -rf -- "$staging"
mkdir -p -- "$transfer" "$into/small" "$into/large"
chmod 700 -- "$staging"

# A part counts as unpacked only if its files exist: a killed push may have moved them. (The transfer itself detects files
# that were lost when the machine was switched off.)
: >>"$transfer/have"
while read -r key; do
    case $key in
        *.*) name=large/${key%.*} ;;
        *) name=small/$key ;;
    esac
    if [ -e "$into/$name" ] || [ -L "$into/$name" ]; then printf '%s\n' "$key"; fi
done <"$transfer/have" >"$transfer/have.new"
rm -rf -- "$transfer/wanted"
mkdir -- "$transfer/wanted"
while read -r word name; do
    case $word in
        want) : >"$transfer/wanted/$name" ;;
        skip) printf '%s\n' "$name" ;;
    esac
done >>"$transfer/have.new"
mv -f -- "$transfer/have.new" "$transfer/have"

# Deletes files that are no longer wanted.
for path in "$into"/* "$into/small"/* "$into/large"/*; do
    case $path in "$into/small" | "$into/large") continue ;; esac
    [ -e "$transfer/wanted/${path##*/}" ] || rm -rf -- "$path"
done
rm -rf -- "$transfer/wanted"
