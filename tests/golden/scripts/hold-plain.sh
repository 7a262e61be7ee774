# Holds a lock for one command: the lock goes when the input ends, so also when the controller or the connection dies.
# Every line of input is a sign of life. Prints held and this host, shared and the host of another node of this command,
# or busy. A host is its name and its boot id.
umask 022
releases=/opt/llm/releases
id=TOKEN
who='root on head'
lock=/opt/llm/releases/.lock

host="$(uname -n) $(cat /proc/sys/kernel/random/boot_id 2>/dev/null || :)"
started() { # started PID: when it was started, in clock ticks; a number is given to many processes in time
    IFS= read -r cc_stat <"/proc/$1/stat" || return 1
    # shellcheck disable=SC2086 # proc(5): the fields after the name, of which the 22nd is the 20th here
    set -- ${cc_stat##*) }
    shift 19
    echo "$1"
} 2>/dev/null
owner() { { IFS= read -r cc_id && IFS= read -r cc_host && read -r cc_pid && read -r cc_began && read -r cc_since && IFS= read -r cc_who; } <"$lock/owner"; } 2>/dev/null
beat() { stat -c %Y -- "$lock/beat" 2>/dev/null || echo none; }
alive() { # whether the owner that was read gives a new sign of life; clocks are not believed, and it may be about to go
    if [ "$cc_host" = "$host" ] && [ "$(started "$cc_pid")" != "$cc_began" ]; then return 1; fi
    cc_beat=$(beat)
    cc_try=0
    while [ "$cc_try" -lt 15 ] && [ -d "$lock" ]; do
        sleep 1
        cc_now=$(beat)
        [ "$cc_now" = "$cc_beat" ] || [ "$cc_now" = none ] || return 0
        cc_try=$((cc_try + 1))
    done
    return 1
}
take() {
    mkdir -- "$lock" 2>/dev/null || return 1
    : >"$lock/beat"
    printf '%s\n' "$id" "$host" "$$" "$(started "$$")" "$(date +%s)" "$who" >"$lock/owner.new"
    mv -- "$lock/owner.new" "$lock/owner"
}
end_workers() { # what runs under the lock on this machine and was left behind by its connection
    cc_try=0
    for cc_worker in "$lock"/worker.*."$(uname -n)"; do
        [ -e "$cc_worker" ] || continue
        cc_group=${cc_worker##*/worker.}
        cc_group=${cc_group%%.*}
        kill -KILL "-$cc_group" 2>/dev/null
        # What is still there after 15 s does nothing any more: a process that the kernel holds ends with the call that it
        # waits in, and one that has ended stays in the list where the machine's first process does not ask after it.
        while kill -0 "-$cc_group" 2>/dev/null && [ "$cc_try" -lt 15 ]; do
            sleep 1
            cc_try=$((cc_try + 1))
        done
        rm -f -- "$cc_worker"
    done
}
# shellcheck disable=SC2329 # the trap calls it
release() { if owner && [ "$cc_id" = "$id" ] && [ "$cc_host" = "$host" ]; then end_workers; rm -rf -- "$lock"; fi; }

mkdir -p -- "${lock%/*}" || exit 1
if [ -n "$releases" ] && [ ! -e "$releases/.clusterctl" ]; then
    # Asked again: a node that shares the folder may just have made it.
    if [ -n "$(ls -A -- "$releases")" ] && [ ! -e "$releases/.clusterctl" ]; then
        echo "$releases is not clusterctl's; choose a prefix in another folder" >&2
        exit 1
    fi
    true >"$releases/.clusterctl" || exit 1
fi
nobody=0
until take; do
    if ! [ -d "$lock" ]; then
        mkdir -- "$lock" || exit 1 # says why it cannot
        rmdir -- "$lock"
    elif owner; then
        if [ "$cc_id" = "$id" ]; then
            echo "shared $cc_host"
            cat >/dev/null
            exit 0
        fi
        if alive; then
            echo "busy $(($(date +%s) - cc_since)) ${cc_who}"
            exit 0
        fi
        cc_dead=$cc_id
        owner && [ "$cc_id" = "$cc_dead" ] || continue # it went by itself, and perhaps another has taken it
        [ "$cc_host" != "$host" ] || end_workers
        mv -- "$lock" "$lock.$$" 2>/dev/null && rm -rf -- "$lock.$$"
    elif [ "$nobody" -lt 3 ]; then
        nobody=$((nobody + 1)) # its owner is about to write its name, or was killed before it could
        sleep 1
    else
        mv -- "$lock" "$lock.$$" 2>/dev/null && rm -rf -- "$lock.$$"
    fi
done
trap release 0
trap 'exit 143' HUP INT TERM
echo "held $host"
while read -r _; do
    if ! owner || [ "$cc_id" != "$id" ]; then
        echo lost
        exit 0
    fi
    true >"$lock/beat"
done
exit 0
