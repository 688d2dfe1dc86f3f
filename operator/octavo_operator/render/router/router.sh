# Runs Envoy with the arguments after $1 until SIGTERM. Its log goes on to this container's. What it says of updates that
# it did not take is in no answer of its admin API, so the last of that is kept in the file $1, for the picker.
file=$1
shift
keep_rejections() {
  local line said=() goes_on=
  while IFS= read -r line || [ "$line" ]; do
    printf '%s\n' "$line" >&2
    case $line in
      '['*'] Filesystem config update '*)
        [ ${#said[@]} -lt 4 ] || said=("${said[@]:1}")
        said+=("${line:0:2000}")
        goes_on=1 ;;
      '['[0-9]*) goes_on= ;;
      *) [ -z "$goes_on" ] || said[-1]="${said[-1]:0:2000}"$'\n'"${line:0:2000}" ;;
    esac
    [ -z "$goes_on" ] || { printf '%s\n' "${said[@]}" >"$file.new" && mv "$file.new" "$file"; }
  done
}
rm -f "$file"
trap 'ended=1; kill -TERM "$child" 2>/dev/null' TERM
exec 3> >(keep_rejections)
reader=$!
envoy "$@" 2>&3 3>&- &
child=$!
exec 3>&-
[ -z "$ended" ] || kill -TERM "$child"
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  status=$?
done
wait "$reader"
exit "$status"
