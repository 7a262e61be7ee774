# Whoever takes the lock ends this script first: a connection that died must not leave it at work, and a command that was
# silent for so long that its lock went must not go on under another one's.
cc_worker=/opt/llm/data/.clusterctl-push-folder.lock/worker.$$.$(uname -n)
true >"$cc_worker" && IFS= read -r cc_id </opt/llm/data/.clusterctl-push-folder.lock/owner && [ "$cc_id" = TOKEN ] || {
    rm -f -- "$cc_worker"
    echo 'the lock is gone: another command has taken over' >&2
    exit 1
}
trap 'rm -f -- "$cc_worker"' 0
# Makes room for a transfer, or goes on with one that broke off. On the input stand names of what is wanted in the
# staging folder (`want NAME`), and keys of legs that only other nodes need (`skip KEY`).
set -e
umask 077 # what is private here is nobody's to read on its way
staging=/opt/llm/data/.clusterctl-push-folder
transfer=/opt/llm/data/.clusterctl-push-folder/transfer
into=/opt/llm/data/.clusterctl-push-folder/tree
# What belongs to another user, who could look into it or be led elsewhere by it, is not gone on with.
[ "$(stat -c %u -- "$staging" 2>/dev/null)" = "$(id -u)" ] || rm -rf -- "$staging"
mkdir -p -- "$transfer" "$into/small" "$into/large"
chmod 700 -- "$staging"

# A leg that was unpacked is there only while its files are: a push may have been killed when it moved them away.
# (What the machine has lost when it was switched off, the transfer finds out by itself.)
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

# What is not wanted any more would fill the disk.
for path in "$into"/* "$into/small"/* "$into/large"/*; do
    case $path in "$into/small" | "$into/large") continue ;; esac
    [ -e "$transfer/wanted/${path##*/}" ] || rm -rf -- "$path"
done
rm -rf -- "$transfer/wanted"
