set -e
umask 022
# What was written before the machine was last started may never have reached its disk.
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo none)
[ "$boot" = "$(cat -- '/opt/it'\''s $(id) "x"/.clusterctl-push-fa65d32886d9/transfer'/boot 2>/dev/null)" ] || rm -rf -- '/opt/it'\''s $(id) "x"/.clusterctl-push-fa65d32886d9/transfer'
mkdir -p -- '/opt/it'\''s $(id) "x"/.clusterctl-push-fa65d32886d9/tree'
[ -d '/opt/it'\''s $(id) "x"/.clusterctl-push-fa65d32886d9/transfer' ] || mkdir -m 700 -- '/opt/it'\''s $(id) "x"/.clusterctl-push-fa65d32886d9/transfer'
echo "$boot" >'/opt/it'\''s $(id) "x"/.clusterctl-push-fa65d32886d9/transfer'/boot
: >>'/opt/it'\''s $(id) "x"/.clusterctl-push-fa65d32886d9/transfer'/have
