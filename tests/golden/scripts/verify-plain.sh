# Compares a release with its lists. Reads only. Prints a line for every difference, the name escaped like sha256sum's.
LC_ALL=C # sha256sum translates what it says
export LC_ALL
umask 077
release=/opt/llm/releases/0123456789ab
cd -- "$release" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf -- "$work"' 0
trap 'exit 143' HUP INT TERM
for list in .clusterctl/files/*; do
    sha256sum -c "$list" 2>/dev/null
done >"$work/checked"
checked=0
while IFS= read -r line; do
    case $line in
        *': OK') checked=$((checked + 1)) ;;
        *': FAILED' | *': FAILED open or read')
            name=${line%: FAILED*}
            if [ -e "$name" ]; then echo "bad changed $name"; else echo "bad missing $name"; fi
            ;;
    esac
done <"$work/checked"
echo "checked $checked"
links=0
while IFS= read -r name && IFS= read -r target; do
    links=$((links + 1))
    there=$(readlink -- "$(printf %b "$name")"; echo x)
    [ "${there%?x}" = "$(printf %b "$target")" ] || echo "bad link $name"
done <.clusterctl/links
# Everything that is not listed was put there by somebody. Names that lists must escape are left out of this comparison.
for list in .clusterctl/files/*; do
    while IFS= read -r line; do
        case $line in \\*) ;; *) printf './%s\n' "${line#*  }" ;; esac
    done <"$list"
done >"$work/listed"
while IFS= read -r name && IFS= read -r target; do
    case $name in *\\*) ;; *) printf './%s\n' "$name" ;; esac
done <.clusterctl/links >>"$work/listed"
find . ! -type d ! -name '*\\*' ! -name '*
*' ! -path './.clusterctl/*' >"$work/found"
LC_ALL=C sort -u "$work/listed" >"$work/listed.sorted"
LC_ALL=C sort "$work/found" >"$work/found.sorted"
LC_ALL=C comm -13 "$work/listed.sorted" "$work/found.sorted" | while IFS= read -r name; do echo "bad added ${name#./}"; done
echo end
