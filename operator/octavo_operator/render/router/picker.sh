# Runs the picker, and again when it has died, until SIGTERM.
trap 'ended=1; kill -TERM "$child" 2>/dev/null' TERM
until [ "$ended" ]; do
  python -m octavo_router "$@" &
  child=$!
  wait "$child"
  [ "$ended" ] || sleep 1
done
wait
