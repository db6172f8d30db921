# ---- what runs on each host -------------------------------------------------------------------
# These functions come to its shell through ssh, with the values that `words_for` adds, and then a
# line each second, as long as the daemons shall live. What they print is for `hear`.

tell() { echo "note $*"; }

fail() {
    echo "fail $*"
    [ -z "$is_ours" ] || rm -rf "$own"
    exit 1
}

# Processes of a run of this folder on this host, beside this shell: all have its lock open. For
# $(left_here), as it closes it for itself.
left_here() {
    local file pid
    exec 8>&-
    for file in /proc/[0-9]*/fd/*; do
        pid=${file#/proc/}
        pid=${pid%%/*}
        [ "$pid" = $$ ] || ! [ "$file" -ef "$own/lock" ] || echo "$pid"
    done 2>/dev/null | sort -u | tr '\n' ' '
}

kill_left() { # kill_left SIGNAL
    local pids
    read -ra pids <<<"$(left_here)"
    [ ${#pids[@]} -eq 0 ] || kill "-$1" "${pids[@]}" 2>/dev/null || true
}

# A folder of this host's own disk, and nobody else's: a key will lie in it.
make_own() {
    own=${TMPDIR:-/tmp}/ballast-$run_name
    mkdir -m 700 "$own" 2>/dev/null || { [ -d "$own" ] && [ -O "$own" ] && [ ! -L "$own" ]; } ||
        fail "$own cannot be made there, or is somebody else's"
    chmod 700 "$own"
    exec 8>"$own/lock"
    if ! flock -n 8; then
        tell "daemons of an earlier run are still there and are ended first"
        kill_left TERM
        flock -w 40 8 || kill_left KILL
        flock -w 10 8 || fail "processes of an earlier run do not end: $(left_here)"
    fi
    is_ours=yes
}

check_programs() {
    local there
    command -v ballast-worker >/dev/null ||
        fail "ballast-worker is neither in $programs there nor on PATH; PROGRAMS= names its folder"
    there=$(ballast-worker --version 2>&1 | sed -n 1p) || true
    [ "$there" = "$version" ] ||
        fail "$(command -v ballast-worker) is another build: '$there', here '$version'"
}

check_folders() {
    local try
    [ -d "$here" ] || fail "$here is not there; job, data and checkpoints must be on all hosts"
    for try in 1 2 3; do
        [ -e "$here/run-ssh/token.$token" ] && break
        [ "$try" = 3 ] || sleep 1
    done
    [ -e "$here/run-ssh/token.$token" ] ||
        fail "$here is there, but is another folder than here: it must be a shared one"
    [ -w "$here" ] || fail "$here cannot be written to there by $(id -un)"
    [ -r "$model/config.json" ] || fail "the model, $model, is not there or cannot be read"
}

check_devices() {
    local there
    [ "$device" != cpu ] || return 0
    there=$({ nvidia-smi -L 2>/dev/null || true; } | wc -l)
    [ "$n_here" -le "$there" ] ||
        fail "has $there GPUs, $n_here are wanted (gpus=N after its name says how many)"
}

bracketed() { case $1 in *:*) echo "[$1]" ;; *) echo "$1" ;; esac; }

# How this host sees the launching machine and is seen by it is what ssh says.
find_addresses() {
    local seen
    read -ra seen <<<"${SSH_CONNECTION:-127.0.0.1 0 127.0.0.1 0}"
    [ -n "$coordinator" ] || coordinator=${seen[0]}
    if [ -z "$address" ]; then
        address=${seen[2]}
        case $address in 127.* | ::1) address=$(hostname -I | cut -d' ' -f1) ;; esac
        [ -n "$address" ] || address=${seen[2]}
    fi
    timeout 10 bash -c ": <>/dev/tcp/$coordinator/$port" 2>/dev/null ||
        fail "port $port of $coordinator, where the coordinator is, is closed to it;" \
            "PORT= and ADDRESS= give others"
}

write_files() {
    local i on data
    rm -rf "$own"/worker* # of a run that had no time to
    (umask 077 && printf '%s\n' "$worker_key" >"$own/worker.key")
    printf '%s\n' "$coordinator_pub" >"$own/coordinator.pub"
    for i in $(seq 0 $((n_here - 1))); do
        on=$device
        [ "$device" = cpu ] || on=$device:$i
        data='*'
        [ -z "$data_port" ] || data=$((data_port + 2 * i))
        (umask 077 && cat >"$own/worker-$i.yaml") <<EOF
name: $label-$i
node: $label
coordinator: tcp://$(bracketed "$coordinator"):$port
key: worker.key
coordinator_key: coordinator.pub
data_address: "tcp://$(bracketed "$address"):$data"
state_dir: $own/worker-$i
allowed_roots: [$roots]
device: $on
EOF
    done
}

worker() {
    exec ballast-worker --config "$own/worker-$1.yaml" >>"$here/run-ssh/$label-$1.log" 2>&1
}

host() {
    local i keepers=() left
    own='' is_ours=''
    trap '' PIPE # that nobody listens any more is seen by `read`
    export PATH="$programs:$PATH"
    make_own
    if [ "$task" = start ]; then
        check_programs
        check_folders
        check_devices
        find_addresses
        write_files
        for i in $(seq 0 $((n_here - 1))); do
            { keep "$label-$i" worker "$i" || echo "gone $label-$i"; } </dev/null &
            keepers+=($!)
        done
        trap 'exec </dev/null' TERM HUP
        echo up
        while read -r -t 300 _; do :; done
        kill "${keepers[@]}" 2>/dev/null || true
    fi
    # Trainers write a checkpoint first, for which they have less than this.
    for left in $(seq 60 -1 0); do
        [ -n "$(left_here)" ] || break
        [ "$left" -gt 0 ] || kill_left KILL
        sleep 1
    done
    rm -rf "$own"
    exit 0
}

# ---- what runs here ---------------------------------------------------------------------------

die() { echo "$0: $*" >&2; exit 1; }
say() { echo "$*" >&2; }

targets=() labels=() gpus=() addresses=() # of each host
n_all=0 # workers of all hosts

read_hosts() { # read_hosts FILE
    local line words word n at=0
    [ -r "$1" ] || die "$1: no list of hosts there: a name a line, and maybe gpus=N address=IP"
    while read -r line || [ -n "$line" ]; do
        at=$((at + 1))
        line=${line%%#*}
        read -ra words <<<"${line%$'\r'}"
        [ ${#words[@]} -gt 0 ] || continue
        n=$n_gpus
        targets+=("${words[0]}")
        addresses+=('')
        for word in "${words[@]:1}"; do
            case $word in
            gpus=[1-9] | gpus=[1-9][0-9] | gpus=[1-9][0-9][0-9]) n=${word#gpus=} ;;
            address=?*) addresses[-1]=${word#address=} ;;
            *) die "$1:$at: '$word' is neither gpus=N nor address=IP" ;;
            esac
        done
        word=${words[0]##*@}
        [[ $word =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || die "$1:$at: '$word' is not a host's name"
        [[ " ${labels[*]} " != *" $word "* ]] || die "$1:$at: $word is there twice"
        labels+=("$word")
        gpus+=("$n")
        n_all=$((n_all + n))
    done <"$1"
    [ "$n_all" -ge "$n_workers" ] ||
        die "$1: room for $n_all workers on ${#labels[@]} hosts, the job has $n_workers"
}

# What the shell of host I reads. Variables of this machine that programs need there go with it.
words_for() {
    local i=$1 name
    declare -f tell fail left_here kill_left make_own check_programs check_folders check_devices \
        bracketed find_addresses write_files worker keep host
    label=${labels[i]} n_here=${gpus[i]} address=${addresses[i]}
    for name in task label n_here address coordinator port data_port token run_name here model \
        roots device programs version worker_key coordinator_pub; do
        printf '%s=%q\n' "$name" "${!name}"
    done
    for name in ${LD_LIBRARY_PATH+LD_LIBRARY_PATH} "${!NCCL_@}"; do
        printf 'export %s=%q\n' "$name" "${!name}"
    done
    echo host
    while [ "$task" = start ] && [ ! -e "$state/end" ] && kill -0 $$ 2>/dev/null; do
        echo
        sleep 1
    done
}

# What host I says: notes, what failed, workers that are gone for good.
hear() {
    local kind text
    while read -r kind text; do
        text=${text//[[:cntrl:]]/?}
        case $kind in
        up) : >"$state/up.$1" ;;
        note) say "${labels[$1]}: $text" ;;
        fail) say "$0: ${labels[$1]}: $text"; : >"$state/failed.$1" ;;
        gone) [[ $text == */* ]] || : >"$state/gone.$text" ;;
        esac
    done
}

# Host I, from the first look to its end. An ssh that ends earlier takes its workers with it.
serve() {
    local i=$1 n codes what errors="$logs/${labels[$1]}.ssh"
    set +e
    words_for "$i" | setsid "${ssh[@]}" "${targets[i]}" bash -s 2>"$errors" | hear "$i"
    codes=("${PIPESTATUS[@]}")
    if [ ! -e "$state/end" ] && [ ! -e "$state/failed.$i" ] &&
        [ "$task ${codes[1]}" != "stop 0" ]; then
        what="cannot be used"
        [ ! -e "$state/up.$i" ] || what="is lost"
        say "$0: ${labels[i]} $what: ssh ended with ${codes[1]}: $(tail -n 1 "$errors")"
        : >"$state/failed.$i"
    fi
    for n in $(seq 0 $((gpus[i] - 1))); do : >"$state/gone.${labels[i]}-$n"; done
}

count() { compgen -G "$state/$1.*" | wc -l; }
n_idle() { ballast workers --no-header -o state 2>/dev/null | grep -c IDLE || true; }

# Whatever ends this script, what it started does not stay. (Hosts miss their line a second.)
end_with_us() {
    while kill -0 $$ 2>/dev/null; do sleep 2; done
    kill "$1" 2>/dev/null
}

# Of a worker that is gone for good, if one is.
last_word() {
    local name
    name=$(compgen -G "$state/gone.*" | head -n 1) || true
    name=${name##*/gone.}
    if [ -e "$logs/$name.log" ]; then echo " $name says: $(tail -n 1 "$logs/$name.log")"
    else echo " see $logs/*.log"; fi
}

start_coordinator() {
    local try why
    for name in coordinator:coordinator worker:worker; do
        ballast keygen "${name%:*}" --role "${name#*:}" --out "$state/keys" --quiet >/dev/null
    done
    (umask 077 && cp "$state/keys/worker.pub" "$state/keys/authorized")
    worker_key=$(cat "$state/keys/worker.key")
    coordinator_pub=$(cat "$state/keys/coordinator.pub")
    cat >"$state/coordinator.yaml" <<EOF
listen: [$BALLAST_ADDRESS, "tcp://0.0.0.0:$port"]
state_dir: $state/coordinator
key: keys/coordinator.key
authorized_keys: keys/authorized
http: {listen: "127.0.0.1:0"}
EOF
    { keep coordinator setsid ballast-coordinator --config "$state/coordinator.yaml" ||
        : >"$state/failed.coordinator"; } >"$logs/coordinator.log" 2>&1 9>&- &
    coordinator_keeper=$!
    end_with_us "$coordinator_keeper" 9>&- &
    watchers+=($!)
    for try in $(seq 100); do
        ballast ping --timeout 2 >/dev/null 2>&1 && return
        grep -q 'started again' "$logs/coordinator.log" && break
        sleep 0.1
    done
    why=$(grep -v 'started again' "$logs/coordinator.log" | tail -n 1)
    [[ $why != *"in use"* ]] || why+="; PORT= gives another"
    die "the coordinator does not start: $why"
}

finish() {
    trap - EXIT
    trap 'say "Not waited for: what is left on hosts ends by itself."; exit 130' INT TERM HUP
    [ -z "$job" ] || kill "$job" 2>/dev/null || true
    : >"$state/end"
    [ ${#servers[@]} -eq 0 ] || wait "${servers[@]}" || true
    ballast events >"$logs/events.txt" 2>/dev/null || true
    if [ -n "$coordinator_keeper" ]; then
        kill "${watchers[@]}" "$coordinator_keeper" 2>/dev/null || true
        wait "$coordinator_keeper" || true
    fi
    rm -f "$here/run-ssh/token.$token"
    rm -rf "$state/keys"
}

told() {
    say "Told to end: workers write a checkpoint first. Once more: that is not waited for."
    exit "$1"
}

start() {
    local i
    coordinator_keeper='' job='' servers=() watchers=()
    rm -rf "$state" "$logs/before"
    mkdir -m 700 "$state" # which fails where it is still there, somebody else's
    mkdir "$logs/before"
    find "$logs" -maxdepth 1 -type f ! -name lock -exec mv -t "$logs/before" {} +
    token=$(od -An -tx8 -N8 /dev/urandom | tr -d ' ')
    : >"$logs/token.$token"
    echo "$(hostname) $$" >"$logs/launcher"
    trap finish EXIT
    trap 'told 130' INT
    trap 'told 143' TERM HUP
    start_coordinator
    for i in "${!labels[@]}"; do
        serve "$i" 9>&- &
        servers+=($!)
    done
    while [ $(($(count up) + $(count failed))) -lt ${#labels[@]} ]; do sleep 0.2; done
    [ "$(count failed)" -eq 0 ] || exit 1 # who has failed has said why
    for _ in $(seq 600); do
        [ "$(n_idle)" -lt "$n_all" ] || break
        [ "$(count gone)" -eq 0 ] || break
        sleep 0.2
    done
    [ "$(n_idle)" -ge "$n_all" ] || die "$(n_idle) of $n_all workers have come;$(last_word)"
    say "$n_all workers on ${#labels[@]} hosts. Logs are in $logs; from another shell:" \
        "$0 status, $0 stop"
    ballast doctor 2>/dev/null | grep '^dashboard' >&2 || true
    setsid ballast submit "$here/job.yaml" --follow 9>&- &
    job=$!
    end_with_us "$job" 9>&- &
    watchers+=($!)
    while kill -0 "$job" 2>/dev/null; do
        [ $((n_all - $(count gone))) -ge "$n_workers" ] ||
            die "$(count gone) of $n_all workers are gone for good, the job needs $n_workers;" \
                "the next run goes on from its checkpoint;$(last_word)"
        sleep 1
    done
    wait "$job"
}

# Words that others than the running script say.
status() {
    ballast ping --timeout 5 >/dev/null 2>&1 || die "nothing of $here runs on this machine"
    say "export BALLAST_ADDRESS=$BALLAST_ADDRESS"
    ballast workers
    ballast jobs -a
}

stop() {
    local on pid
    read -r on pid <"$logs/launcher"
    [ "$on" = "$(hostname)" ] || die "it runs on $on; say stop there"
    kill "$pid"
    flock -w 120 9 || die "process $pid does not end"
}

# After a run that could not: its daemons end by themselves, this waits for it.
sweep() {
    local i
    rm -rf "$state"
    mkdir -m 700 "$state"
    for i in "${!labels[@]}"; do serve "$i" & done
    wait
    [ "$(count failed)" -eq 0 ]
}

logs=$here/run-ssh
run_name=ssh-$(id -un)-$(echo "$here" | cksum | cut -d' ' -f1)
state=${TMPDIR:-/tmp}/ballast-here-$run_name
port=${PORT:-7070} data_port=${DATA_PORT:-} coordinator=${ADDRESS:-}
programs=${PROGRAMS:-$(dirname "$(command -v ballast-worker)")}
version=$(ballast-worker --version | sed -n 1p)
token='' worker_key='' coordinator_pub=''
read -ra ssh <<<"${SSH:-ssh} -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
export BALLAST_ADDRESS=ipc://$state/coordinator.sock
unset BALLAST_KEY BALLAST_COORDINATOR_KEY
case ${1:-} in
-h | --help) sed -n '/^set /q; /^# /s/^# //p; s/^#$//p' "$0"; exit ;;
status) status; exit ;;
esac
mkdir -p "$logs"
exec 9>"$logs/lock"
is_free=true
flock -n 9 || is_free=false
task=start
if [ "${1:-}" != stop ]; then
    read_hosts "${1:-$here/hosts}"
    ballast submit "$here/job.yaml" --dry-run --quiet >/dev/null
    $is_free || die "$here runs already, on $(cat "$logs/launcher"); '$0 stop' ends that"
    start
elif $is_free; then
    task=stop
    read_hosts "${2:-$here/hosts}"
    sweep
else
    stop
fi
