# Gives the destination the mode that it shall have. Only when the lock, which lies in it, has gone.
set -e
staging='/opt/it'\''s $(id) "x"/data/.clusterctl-push-folder'
[ ! -e "$staging.lock" ] || exit 0 # another push is at work and does it
[ -e "$staging/mode" ] || exit 0
mode=$(cat -- "$staging/mode")
rm -rf -- "$staging"
chmod -- "$mode" '/opt/it'\''s $(id) "x"/data'
