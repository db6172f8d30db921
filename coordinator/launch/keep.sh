
# keep NAME COMMAND...: runs it, and again 2 s after it has ended by itself, five times; one that
# has lived for ten minutes has all five again. A wrong configuration, which is exit code 2, is not
# cured by trying again. Told to end (TERM) it passes that on and returns 0.
keep() {
    local name=$1 told='' pid='' left=5 rc began
    shift
    trap 'told=now; [ -z "$pid" ] || { told=passed; kill "$pid" 2>/dev/null; }' TERM
    while :; do
        began=$SECONDS
        "$@" &
        pid=$!
        [ "$told" != now ] || kill "$pid" 2>/dev/null || true
        rc=0
        wait "$pid" || rc=$?
        while kill -0 "$pid" 2>/dev/null; do # it was a signal to this shell that ended the wait
            wait "$pid" || rc=$?
        done
        pid=
        [ -z "$told" ] || return 0
        [ $((SECONDS - began)) -lt 600 ] || left=5
        [ "$rc" -ne 2 ] || left=0
        if [ "$left" -eq 0 ]; then
            tell "$name ended with exit code $rc and is not started again"
            return 1
        fi
        tell "$name ended with exit code $rc and is started again, $left times at most"
        left=$((left - 1))
        sleep 2 & # what a signal cannot hold up
        wait $! || true
        [ -z "$told" ] || return 0
    done
}
