# A command that takes the lock ends this script first: a lost connection must not leave it running, and a command that
# lost its lock by silence must not continue under another command's lock.
cc_worker='/opt/it'\''s $(id) "x"/releases/.lock'/worker.$$.$(uname -n)
true >"$cc_worker" && IFS= read -r cc_id <'/opt/it'\''s $(id) "x"/releases/.lock'/owner && [ "$cc_id" = TOKEN ] || {
    rm -f -- "$cc_worker"
    echo 'the lock no longer exists: another command has taken over' >&2
    exit 1
}
trap 'rm -f -- "$cc_worker"' 0
# Starts a release, and takes the files that it shares with other releases. The input has three parts, each ended by a
# line ".": keys of lists, the files that can be made from another release's files, and the words to replace in those.
# Prints a line for each: have KEY (already complete), damaged RELEASE KEY (files were changed: never linked), made
# NUMBER (the file of that line was made), free BYTES (for the files that are sent).
set -e
umask 022
releases='/opt/it'\''s $(id) "x"/releases'
id=0123456789ab
replace=no
base=ba9876543210
incoming=$releases/.incoming-$id
transfer=$releases/.transfer-$id

discard() { # discard PATH...: also deletes read-only folders; never changes files, which other releases may link
    for cc_path; do
        [ -e "$cc_path" ] || [ -L "$cc_path" ] || continue
        find "$cc_path" -type d '(' -perm -500 -o -exec chmod u+rx {} ';' ')' -exec chmod u+w {} +
        rm -rf -- "$cc_path"
    done
}
# Lists have the format of `sha256sum -c`: a line starts with a backslash if \\, \n or \r stand in its name for a backslash, a
# newline and a carriage return. Systems read such lines differently, and the name - is sha256sum's input everywhere:
# this file reads these odd lines. Lists of earlier versions contain bare carriage returns.
cc_cr=$(printf '\r')
is_odd() { # is_odd LINE
    case $1 in \\* | *"$cc_cr"* | *'  -') return 0 ;; esac
    return 1
}
name_of() { # name_of LINE: sets cc_name
    cc_name=${1#*  }
    case $1 in
        \\*)
            cc_name=$(printf '%bx' "$cc_name")
            cc_name=${cc_name%x}
            ;;
    esac
}
is_good() { # is_good LINE: whether the file has the digest of an odd line
    name_of "$1"
    [ -f "./$cc_name" ] || return 1
    cc_wanted=${1#\\}
    cc_found=$(sha256sum <"./$cc_name") && [ "${cc_found%% *}" = "${cc_wanted%% *}" ]
}
check_list() { # check_list LIST: prints the output of `sha256sum -c` for the lines that are not odd
    while IFS= read -r cc_line; do
        is_odd "$cc_line" || printf '%s\n' "$cc_line"
    done <"$1" | sha256sum -c -
}
names() { # names LIST: prints a sha256sum list's names, NUL-terminated; sets cc_odd if it has odd lines
    cc_odd=
    while IFS= read -r cc_line; do
        ! is_odd "$cc_line" || cc_odd=yes
        case $cc_line in
            \\*) printf '%b\0' "${cc_line#*  }" ;;
            *) printf '%s\0' "${cc_line#*  }" ;;
        esac
    done <"$1"
}
is_whole() { # is_whole LIST: whether all its files match their digests; call `names` first
    if [ -z "$cc_odd" ]; then
        sha256sum -c "$1"
        return
    fi
    cc_plain=
    while IFS= read -r cc_line; do
        if is_odd "$cc_line"; then is_good "$cc_line" || return 1; else cc_plain=yes; fi
    done <"$1"
    [ -z "$cc_plain" ] || check_list "$1"
} >/dev/null 2>&1
folders() { # folders LIST: the folders of those names; "." for the root
    cc_last=
    while IFS= read -r cc_line; do
        cc_name=${cc_line#*  }
        case $cc_name in
            */*) cc_name=${cc_name%/*} ;;
            *) cc_name=. ;;
        esac
        [ "$cc_name" != "$cc_last" ] || continue
        cc_last=$cc_name
        case $cc_line in
            \\*) printf '%b\0' "$cc_name" ;;
            *) printf '%s\0' "$cc_name" ;;
        esac
    done <"$1"
}

# Leftovers of an interrupted deploy of another release, and of replaced or removed releases.
for left in "$releases"/.incoming-* "$releases"/.transfer-* "$releases"/.removing-*; do
    case $left in
        "$incoming" | "$transfer") ;;
        *) discard "$left" ;;
    esac
done
# Data written before the last boot may not have reached the disk.
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo none)
if ! [ -d "$incoming" ] || ! [ "$boot" = "$(cat -- "$transfer/boot" 2>/dev/null)" ]; then
    discard "$incoming" "$transfer"
    mkdir -- "$incoming"
    mkdir -m 700 -- "$transfer"
    echo "$boot" >"$transfer/boot"
fi
: >>"$transfer/have"

# Whether this system's tools can link a list of names, and create their folders.
link_names() { xargs -0 cp -lPf --parents -t "$1" --; } # link_names FOLDER
copy_names() { tar -c --null --no-recursion -T - -f - | tar -xpof - -C "$incoming"; }
rm -rf -- "$transfer/try"
mkdir -p -- "$transfer/try/a"
: >"$transfer/try/a/b"
can_link=no
if (cd -- "$transfer/try" && printf 'a/b\0' | link_names a && [ a/b -ef a/a/b ]) 2>/dev/null; then
    can_link=yes
fi
rm -rf -- "$transfer/try"

take() { # take RELEASE KEY: links another release's files; fails if they do not match their list or cannot be linked
    cd -- "$1" || return 1
    cc_list=.clusterctl/files/$2
    names "$cc_list" >"$transfer/names" || return 1
    printf '%s\0' "$cc_list" >>"$transfer/names"
    if ! is_whole "$cc_list"; then
        echo "damaged ${1##*/} $2"
        return 1
    fi
    folders "$cc_list" | (cd -- "$incoming" && xargs -0 mkdir -p --) || return 1
    mkdir -p -- "$incoming/.clusterctl/files" || return 1
    if { [ "$can_link" = yes ] && link_names "$incoming" <"$transfer/names"; } 2>/dev/null; then
        return 0
    fi
    copy_names <"$transfer/names" 2>/dev/null
}
while read -r key && [ "$key" != . ]; do
    while read -r had; do
        [ "$had" != "$key" ] || continue 2
    done <"$transfer/have"
    for release in "$releases"/*/; do
        release=${release%/}
        [ -e "$release/.clusterctl/files/$key" ] || continue
        if [ "${release##*/}" = "$id" ] && [ "$replace" != yes ]; then continue; fi
        if (take "$release" "$key") </dev/null; then
            echo "$key" >>"$transfer/have"
            break
        fi
    done
done
# Files that differ from another release's only in words of equal length: replaced in a tar stream, which stays valid.
while IFS= read -r line && [ "$line" != . ]; do printf '%s\n' "$line"; done >"$transfer/makes"
cat >"$transfer/words"
if [ -s "$transfer/makes" ] && [ -d "$releases/$base" ] && command -v sed >/dev/null 2>&1; then
    (
        cd -- "$releases/$base"
        names "$transfer/makes" | tar -c --null --no-recursion -T - -f - | LC_ALL=C sed -f "$transfer/words" |
            tar -xpof - -C "$incoming"
    ) 2>/dev/null || true # files that do not match are sent
    cd -- "$incoming"
    number=0
    while IFS= read -r line; do
        if printf '%s\n' "$line" | sha256sum -c - >/dev/null 2>&1; then echo "made $number"; fi
        number=$((number + 1))
    done <"$transfer/makes"
    cd /
fi
while read -r had; do echo "have $had"; done <"$transfer/have"
# shellcheck disable=SC2046 # two numbers; what was left has made room
set -- $(stat -f -c '%a %S' -- "$releases" 2>/dev/null)
[ $# -ne 2 ] || echo "free $(($1 * $2))"
echo end
