# Before Envoy gets SIGTERM, which ends it with all its streams: clients are told to connect anew, new ones still come
# for $1 seconds, and running requests have $2 more.
ask() {
  exec 3<>"/dev/tcp/127.0.0.1/$3" && printf '%s /%s HTTP/1.1\r\nHost: admin\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' "$1" "$2" >&3 && cat <&3
}
ask POST healthcheck/fail "$3" >/dev/null
sleep "$1"
for ((i = 0; i < $2; i++)); do
  ask GET 'stats?filter=^http.clients.downstream_rq_active$' "$3" | grep -q 'active: [1-9]' || break
  sleep 1
done
