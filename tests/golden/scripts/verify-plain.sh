# Compares a release with its lists. Read-only. Prints a line for each difference; in its name \\, \n and \r stand for a
# backslash, a newline and a carriage return, so that every name is one line.
LC_ALL=C # sha256sum translates its messages
export LC_ALL
umask 077
release=/opt/llm/releases/0123456789ab
cd -- "$release" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf -- "$work"' 0
trap 'exit 143' HUP INT TERM
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
cc_newline='
'
# A script for `sh -c`: prints its arguments, escaped.
# shellcheck disable=SC2016 # the inner sh expands it
escape='
    odd="[\\\\$1$2]"
    cr=$2
    shift 2
    for name; do
        escaped=
        while :; do
            # shellcheck disable=SC2254 # a pattern
            case $name in *$odd*) ;; *) break ;; esac
            head=${name%%$odd*}
            name=${name#"$head"}
            case $name in
                \\*) escaped="$escaped$head\\\\" ;;
                "$cr"*) escaped="$escaped$head\\r" ;;
                *) escaped="$escaped$head\\n" ;;
            esac
            name=${name#?}
        done
        printf "%s\n" "$escaped$name"
    done'
escaped() { sh -c "$escape" sh "$cc_newline" "$cc_cr" "$@"; }
found() { # found TYPE: the paths of this type, escaped
    find . -type "$1" ! -path '*\\*' ! -path "*$cc_newline*" ! -path "*$cc_cr*" -print
    find . -type "$1" '(' -path '*\\*' -o -path "*$cc_newline*" -o -path "*$cc_cr*" ')' \
        -exec sh -c "$escape" sh "$cc_newline" "$cc_cr" {} +
}
extra() { # extra LISTED FOUND: files that were added later
    LC_ALL=C sort -u "$1" >"$1.sorted"
    LC_ALL=C sort "$2" >"$2.sorted"
    LC_ALL=C comm -13 "$1.sorted" "$2.sorted" | while IFS= read -r name; do printf '%s\n' "bad added ${name#./}"; done
}

checked=0
plain=0 # lines that sha256sum -c must answer
for list in .clusterctl/files/*; do
    odd=
    printf './%s\n' "$list" >&4
    while IFS= read -r line; do
        if ! is_odd "$line"; then
            printf './%s\n' "${line#*  }" >&4
            plain=$((plain + 1))
            continue
        fi
        odd=yes
        if is_good "$line"; then
            checked=$((checked + 1))
            escaped "./$cc_name" >&4
        else
            name=$(escaped "./$cc_name")
            printf '%s\n' "$name" >&4
            if [ -e "./$cc_name" ]; then printf 'bad changed %s\n' "${name#./}"; else printf 'bad missing %s\n' "${name#./}"; fi
        fi
    done <"$list"
    if [ "$odd" ]; then check_list "$list"; else sha256sum -c "$list"; fi 2>/dev/null >>"$work/checked"
done 4>"$work/files"
while IFS= read -r line; do
    case $line in
        *': OK') checked=$((checked + 1)) ;;
        *': FAILED' | *': FAILED open or read')
            name=${line%: FAILED*}
            if [ -e "./$name" ]; then printf 'bad changed %s\n' "$name"; else printf 'bad missing %s\n' "$name"; fi
            ;;
        *) continue ;;
    esac
    plain=$((plain - 1))
done <"$work/checked"
[ "$plain" -eq 0 ] || echo "bad changed .clusterctl/files" # an invalid line, or an unreadable list
echo "checked $checked"
while IFS= read -r name && IFS= read -r target; do
    path=$name
    goal=$target
    case $name$target in
        *\\* | *"$cc_cr"*)
            path=$(printf '%bx' "$name")
            path=${path%x}
            goal=$(printf '%bx' "$target")
            goal=${goal%x}
            name=$(escaped "$path")
            ;;
    esac
    printf './%s\n' "$name" >&4
    there=$(readlink -- "./$path" && echo x)
    [ "$there" = "$goal${cc_newline}x" ] || printf 'bad link %s\n' "$name"
done <.clusterctl/links 4>"$work/links"
for name in complete links release.json stale; do echo "./.clusterctl/$name"; done >>"$work/files"
found f >"$work/files.found"
found l >"$work/links.found"
for type in b c p s; do found "$type"; done >"$work/others.found"
: >"$work/others"
for type in files links others; do extra "$work/$type" "$work/$type.found"; done
echo end
