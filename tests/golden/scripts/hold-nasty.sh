# Holds a lock for one command. It is released when the input ends, so also when the controller or connection dies.
# Every input line is a heartbeat. Prints "held" and this host, "shared" and the host of another node of this command,
# or "busy". A host is its name and its boot id.
umask 022
releases='/opt/it'\''s $(id) "x"/releases'
id=TOKEN
who='root on head'
lock='/opt/it'\''s $(id) "x"/releases/.lock'

host="$(uname -n) $(cat /proc/sys/kernel/random/boot_id 2>/dev/null || :)"
started() { # started PID: its start time in clock ticks, because process ids are reused
    IFS= read -r cc_stat <"/proc/$1/stat" || return 1
    # shellcheck disable=SC2086 # proc(5): the fields after the name, of which the 22nd is the 20th here
    set -- ${cc_stat##*) }
    shift 19
    echo "$1"
} 2>/dev/null
owner() { { IFS= read -r cc_id && IFS= read -r cc_host && read -r cc_pid && read -r cc_began && read -r cc_since && IFS= read -r cc_who; } <"$lock/owner"; } 2>/dev/null
beat() { stat -c %Y -- "$lock/beat" 2>/dev/null || echo none; }
alive() { # whether the owner sends a new heartbeat; clocks are not trusted, and it may be about to exit
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
end_workers() { # ends processes that run under the lock on this machine after their connection was lost
    cc_try=0
    for cc_worker in "$lock"/worker.*."$(uname -n)"; do
        [ -e "$cc_worker" ] || continue
        cc_group=${cc_worker##*/worker.}
        cc_group=${cc_group%%.*}
        kill -KILL "-$cc_group" 2>/dev/null
        # A process that survives 15 s does no more work: one that is blocked in the kernel ends when its system call
        # returns, and a zombie remains listed if the machine's first process does not reap it.
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
    # Check again: a node that shares the folder may just have created it.
    if [ -n "$(ls -A -- "$releases")" ] && [ ! -e "$releases/.clusterctl" ]; then
        echo "$releases is not clusterctl's; choose a prefix in another folder" >&2
        exit 1
    fi
    true >"$releases/.clusterctl" || exit 1
fi
nameless=0
until take; do
    if ! [ -d "$lock" ]; then
        mkdir -- "$lock" || exit 1 # prints the reason
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
        owner && [ "$cc_id" = "$cc_dead" ] || continue # its owner released it, and another may have taken it
        [ "$cc_host" != "$host" ] || end_workers
        mv -- "$lock" "$lock.$$" 2>/dev/null && rm -rf -- "$lock.$$"
    elif [ "$nameless" -lt 3 ]; then
        nameless=$((nameless + 1)) # its owner has not written its name yet, or was killed before
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
